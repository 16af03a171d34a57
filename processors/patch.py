"""`patch`: put 4-bit self-attention into a diffusers Wan pipeline, say what ran, and take it out again.

Nothing outside the pipeline changes: no state of diffusers or torch, no parameter, no key of a state_dict. What does:
each self-attention's processor, and on each transformer a `cache_context` that also tells us where the run is, and two
forward hooks. `restore` puts the very same processor objects back.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from wanfp4.errors import BackendError, FallbackError, ModelError, UnsupportedInputError
from wanfp4.kernels import dispatch, ops
from wanfp4.kernels.automatic import AUTO, automatic
from wanfp4.policy import EXACT, Policy, get_policy
from wanfp4.processors.session import Clock, Observer, Session, Site, log
from wanfp4.processors.wan import PARALLEL, Wan4BitAttnProcessor
from wanfp4.receipt import Receipt, Unpatched

# diffusers splits text from image tokens here, whatever the text's length (its WanAttnProcessor).
TEXT_TOKENS = 512

_SELF_ATTENTION = re.compile(r"(?:.*\.)?(\w+)\.(\d+)\.attn1")


def patch(
    pipe: Any, policy: str | Path | Policy = "wan-fast", backend: str | None = None, *, strict: bool = False
) -> Patch:
    """Run the self-attention of `pipe` with `policy` until the returned handle is restored.

    pipe     a diffusers pipeline that holds Wan transformers (WanPipeline, its relatives for image, video, VACE,
             Animate, Lucy Edit, ChronoEdit, modular ones), compiled or not, or one such transformer. Both experts of
             Wan2.2 are patched. Cross-attention never is.
    policy   a preset's name, a `Policy`, the path of a policy's JSON file, or "auto": FP4 on B200 and its kin, FP8 on
             Hopper and on GeForce and data-centre cards from Ada on, the pipeline's own attention elsewhere. It goes by
             where the weights are, and for weights on the CPU by the current GPU, if there is one. The handle's
             `policy` is what that was, its `why` says why.
    backend  name of the backend to use; None takes the fastest that can run each call.
    strict   make everything an error that would leave attention to the pipeline although the policy asks for 4 bits.

    A patched pipeline that is patched again is restored first, so there is always one patch. The handle is a context
    manager; a handle that is dropped leaves the pipeline patched.

    Raises ModelError (no Wan transformer), PolicyError, BackendError (unknown backend, one that cannot run the policy
    here, or context parallelism), FallbackError (strict, and a self-attention has to be left alone) and
    UnsupportedInputError (head_dim other than 128). After an error the pipeline is as it was.
    """
    experts = [_inspect(name, component) for name, component in _wan_components(pipe).items()]
    why = None
    if policy == AUTO:
        if backend is not None:
            raise BackendError(f"policy 'auto' chooses the backend, too; name a policy, or leave {backend!r} out")
        chosen, why = automatic(*_likely_place(experts))
        log.info("%s", why)
    else:
        chosen = get_policy(policy)
    _check_backend(chosen, backend, strict, experts)
    left_alone = [module for expert in experts for module in expert.unpatched]
    if strict and left_alone:
        first = left_alone[0]
        raise FallbackError(
            f"strict: {len(left_alone)} self-attentions would keep the pipeline's own attention; "
            f"{first.expert} {first.module}: {first.reason}"
        )
    for i, rule in enumerate(chosen.rules):
        # The clock's sigma is not known yet; what can be known is that no layer or expert of this model is meant.
        anywhere = rule.sigma[0] if rule.sigma else None
        if not any(
            rule.matches(site.layer, site.num_layers, anywhere, expert.name)
            for expert in experts
            for _, _, site in expert.attentions
        ):
            log.warning("rules[%d] of policy %r names no layer of this pipeline, so it never applies", i, chosen.name)
    for earlier in {id(s): s for expert in experts for s in _sessions_in(expert.transformer)}.values():
        earlier.handle.restore()
    return Patch(pipe, chosen, backend, strict, experts, left_alone, why)


class Patch:
    """A patch that is in force until `restore` (or until the pipeline is patched again).

    policy, backend, strict  as given to `patch`.
    why  for the policy "auto", why it is what it is; else None.
    """

    def __init__(
        self,
        pipe: Any,
        policy: Policy,
        backend: str | None,
        strict: bool,
        experts: list[_Expert],
        unpatched: list[Unpatched],
        why: str | None = None,
    ) -> None:
        self.policy = policy
        self.why = why
        self.backend = backend
        self.strict = strict
        self._pipeline = type(pipe).__name__
        self._unpatched = tuple(unpatched)
        clock = Clock(None if isinstance(pipe, nn.Module) else pipe)
        self._session = _PatchSession(
            policy,
            backend,
            strict,
            clock,
            [expert.name for expert in experts],
            [[site for _, _, site in expert.attentions] for expert in experts],
        )
        self._session.handle = self
        self._installed: list[tuple[str, Any, Wan4BitAttnProcessor]] = []
        self._undo: list[Callable[[], None]] = []
        for number, expert in enumerate(experts):
            made = []
            for index, (name, attention, _) in enumerate(expert.attentions):
                site = ops.make_site(self._session.number, number, index)
                processor = Wan4BitAttnProcessor(attention.processor, self._session, site)
                attention.set_processor(processor)
                made.append(processor)
                self._installed.append((f"{expert.name} {name}", attention, processor))
            self._session.processors.append(made)
            self._undo += _listen(expert, clock)
        for module in unpatched[:1]:
            log.warning(
                "%d self-attentions keep the pipeline's own attention; %s %s: %s",
                len(unpatched),
                module.expert,
                module.module,
                module.reason,
            )

    @property
    def active(self) -> bool:
        """False once restored, by hand or by a later patch of the same pipeline."""
        return self._session.active

    def restore(self) -> None:
        """Put the original processor objects back; does nothing when that was done before.

        A processor that somebody else set since is left in place, with a warning. An attention backend or a parallel
        configuration that was set on the patched model since is carried over to the original processors.
        """
        if not self.active:
            return
        self._session.active = False
        for name, attention, processor in self._installed:
            original = processor.original
            for setting in ("_attention_backend", "_parallel_config"):
                if getattr(processor, setting) is not getattr(original, setting, None):
                    setattr(original, setting, getattr(processor, setting))
            if attention.processor is processor:
                attention.set_processor(original)
            else:
                found = type(attention.processor).__name__
                log.warning("%s has had a new processor since it was patched, %s; it is left in place", name, found)
        for undo in self._undo:
            undo()
        self._installed.clear()
        self._undo.clear()

    def receipt(self) -> Receipt:
        """What ran since the patch, or since `reset`; also after `restore`."""
        entries = self._session.ledger.entries()
        return Receipt(self.policy, self.backend, self.strict, self._pipeline, entries, self._unpatched)

    def reset(self) -> None:
        """Forget what ran so far."""
        self._session.ledger.clear()

    @contextmanager
    def observing(self, observer: Observer) -> Iterator[None]:
        """Inside the block, hand every self-attention call that this patch runs to `observer`, after it ran.

        What `observer` returns goes on in the model in place of the call's result; None leaves the result.
        """
        before, self._session.observer = self._session.observer, observer
        try:
            yield
        finally:
            self._session.observer = before

    def __enter__(self) -> Patch:
        return self

    def __exit__(self, *_: object) -> None:
        self.restore()

    def __repr__(self) -> str:
        state = "active" if self.active else "restored"
        return f"<Patch of {self._pipeline}: {self.policy.name} on {self.backend or 'any backend'}, {state}>"


class _PatchSession(Session):
    """A session that its own patch can be found by, through the processors it left in a model."""

    handle: Patch


@dataclass(frozen=True)
class _Expert:
    """A transformer and its self-attentions: those to patch as (name, module, site), and those left alone."""

    name: str
    component: nn.Module
    transformer: nn.Module
    attentions: list[tuple[str, Any, Site]] = field(default_factory=list)
    unpatched: list[Unpatched] = field(default_factory=list)


def _wan_components(pipe: Any) -> dict[str, nn.Module]:
    """The components that are Wan transformers, by name. Raises ModelError when there is none."""
    if isinstance(pipe, nn.Module):
        components: Mapping[str, Any] = {"transformer": pipe}
    else:
        components = getattr(pipe, "components", None) or {}
        if not isinstance(components, Mapping) or not components:
            raise ModelError(f"patch needs a diffusers Wan pipeline or a Wan transformer; found {type(pipe).__name__}")
    found: dict[str, nn.Module] = {}
    for name, component in components.items():
        # One transformer under two names is one expert.
        if isinstance(component, nn.Module) and _is_wan(component) and all(component is not c for c in found.values()):
            found[name] = component
    if not found:
        held = ", ".join(
            f"{name}: {type(_unwrap(c)).__name__}" for name, c in components.items() if isinstance(c, nn.Module)
        )
        raise ModelError(
            f"{type(pipe).__name__} holds no Wan transformer (WanTransformer3DModel or a relative); "
            f"its models are {held or 'none'}"
        )
    return found


def _is_wan(model: nn.Module) -> bool:
    return any(_named(module, "WanAttention", "WanAnimate2Attention") for module in model.modules())


def _named(module: nn.Module, *names: str) -> bool:
    """By class name, subclasses included: Animate and ChronoEdit have classes of their own that bear the same names."""
    return any(cls.__name__ in names for cls in type(module).__mro__)


def _unwrap(module: Any) -> Any:
    while hasattr(module, "_orig_mod"):  # torch.compile
        module = module._orig_mod
    return module


def _inspect(name: str, component: nn.Module) -> _Expert:
    """Find a transformer's self-attentions. Raises UnsupportedInputError and BackendError on what cannot be patched."""
    expert = _Expert(name, component, _unwrap(component))
    config = getattr(expert.transformer, "config", None)
    for path, module in expert.transformer.named_modules():
        if not _named(module, "WanAttention", "WanAnimate2Attention") or module.is_cross_attention:
            continue
        path = path.replace("_orig_mod.", "")
        attention: Any = module
        original = _original(attention.processor)
        place = _SELF_ATTENTION.fullmatch(path)
        if _named(module, "WanAnimate2Attention"):
            reason = "WanAnimate2Attention attends to cached reference tokens through a block mask"
        elif place is None:
            reason = "it is not the attn1 of a block in a list, so a policy's layers cannot name it"
        elif type(original) is not attention._default_processor_cls:
            reason = f"it has a processor of its own, {type(original).__name__}"
        else:
            head_dim = attention.inner_dim // attention.heads
            if head_dim != dispatch.HEAD_DIM:
                raise UnsupportedInputError(
                    f"4-bit attention needs head_dim {dispatch.HEAD_DIM}; {name} {path} has head_dim {head_dim}"
                )
            if any(p._parallel_config is not None for p in (original, attention.processor)):
                raise BackendError(f"{name} {path}: {PARALLEL}")
            blocks, layer = place[1], int(place[2])
            siblings = len(getattr(expert.transformer, "blocks", ())) or layer + 1
            if blocks == "vace_blocks":
                layer = getattr(config, "vace_layers", range(siblings))[layer]
            expert.attentions.append((path, attention, Site(blocks, layer, siblings)))
            continue
        expert.unpatched.append(Unpatched(name, path, reason))
    return expert


def _original(processor: Any) -> Any:
    return processor.original if isinstance(processor, Wan4BitAttnProcessor) else processor


def _sessions_in(transformer: nn.Module) -> Iterator[_PatchSession]:
    """Sessions of patches that are in force on `transformer`."""
    for module in transformer.modules():
        processor = getattr(module, "processor", None)
        if isinstance(processor, Wan4BitAttnProcessor) and isinstance(processor.session, _PatchSession):
            yield processor.session


def _devices(experts: list[_Expert]) -> list[torch.device]:
    """Where the experts may run: the GPU, if there is one, and where their weights are."""
    devices = [torch.device("cuda")] if torch.cuda.is_available() else []
    for parameter in (next(expert.transformer.parameters(), None) for expert in experts):
        if parameter is not None and parameter.device.type != "meta":  # weights that offloading keeps elsewhere
            devices.append(parameter.device)
    return devices or [torch.device("cpu")]


def _likely_place(experts: list[_Expert]) -> tuple[torch.device, torch.dtype]:
    """Where the experts will most likely run, and in which dtype: where their weights are, if that is no CPU."""
    dtype = getattr(experts[0].transformer, "dtype", torch.bfloat16)  # not a parameter's: Wan keeps some in float32
    devices = _devices(experts)
    on_gpu = [device for device in devices[::-1] if device.type != "cpu"]
    return (on_gpu or devices)[0], dtype


def _check_backend(policy: Policy, backend: str | None, strict: bool, experts: list[_Expert]) -> None:
    """Raise what is already certain: the backend does not exist, or can run the policy on no device it may meet.

    A pipeline may be moved to the GPU after it was patched, so a refusal on the CPU alone is not certain.
    """
    if backend is None and not strict:
        return
    for wanted in policy.rounding or (EXACT,):
        errors = []
        for device in _devices(experts):
            try:
                dispatch.select(wanted, device, backend)
            except BackendError as error:
                errors.append(error)
            else:
                break
        else:
            raise FallbackError(f"strict: {errors[-1]}") if backend is None else errors[-1]


def _listen(expert: _Expert, clock: Clock) -> list[Callable[[], None]]:
    """Have the clock hear where the run is; returns what undoes it."""
    transformer: Any = expert.transformer
    undo: list[Callable[[], None]] = []
    if hasattr(transformer, "cache_context"):
        before = vars(transformer).get("cache_context")
        own = transformer.cache_context

        @contextmanager
        def cache_context(name: str, **kwargs: Any) -> Iterator[Any]:
            sigma = None if kwargs.get("sigma") is None else float(kwargs["sigma"])
            with clock.context(name, kwargs.get("step_index"), sigma), own(name, **kwargs) as value:
                yield value

        transformer.cache_context = cache_context

        def restore_context() -> None:
            if vars(transformer).get("cache_context") is not cache_context:
                log.warning("%s has had a new cache_context since it was patched; it is left in place", expert.name)
            elif before is None:
                del transformer.cache_context
            else:
                transformer.cache_context = before

        undo.append(restore_context)
    takes_image = any(getattr(module, "add_k_proj", None) is not None for module in transformer.modules())
    # A compiled wrapper is called outside its graph: the timestep can still be heard there, and errors stay clear.
    for module in {id(m): m for m in (expert.component, transformer)}.values():
        if takes_image:
            undo.append(module.register_forward_pre_hook(_check_text, with_kwargs=True).remove)
        undo.append(module.register_forward_pre_hook(clock.before_forward, with_kwargs=True).remove)
        undo.append(module.register_forward_hook(clock.after_forward).remove)
    return undo


def _check_text(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Refuse a text length that diffusers would split from the image tokens at the wrong place, without an error."""
    text = kwargs["encoder_hidden_states"] if "encoder_hidden_states" in kwargs else args[2] if len(args) > 2 else None
    if text is not None and text.shape[1] != TEXT_TOKENS:
        raise UnsupportedInputError(
            f"this model takes image tokens, which diffusers splits from the text at {TEXT_TOKENS} text tokens; found "
            f"{text.shape[1]} (pass max_sequence_length={TEXT_TOKENS})"
        )
