# make demo, make lab, make test, make lint, make wheel-test: each sets up what it needs first. make help lists all.
VENV ?= .venv
PYTHON ?= python3
PROMPT ?= a red circle moving right on a white background
OUT ?= out/demo
LAB ?= out/lab
JOBS ?= auto
BIN := $(VENV)/bin
STAMP := $(VENV)/.setup-done
export PYTHON
# Threads that wait sleep instead of spinning: on a machine that does anything else, spinning makes each small operation
# of the sample pipeline wait for a time slice, and a run takes five times as long.
export OMP_WAIT_POLICY ?= PASSIVE

.DEFAULT_GOAL := help
.PHONY: help setup demo lab test lint wheel-test clean

help: ## this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 22

setup: $(STAMP) ## virtual environment with pinned dependencies (PyTorch for the CPU where there is no NVIDIA GPU)

# Inside the environment, so that removing the environment undoes the setup.
$(STAMP): pyproject.toml constraints.txt .ci/setup .ci/install-torch
	@.ci/setup $(VENV)
	@touch $@

demo: $(STAMP) ## generate PROMPT with wan-fast and with BF16, and write a drift report, into out/demo
	@$(BIN)/wanfp4 generate "$(PROMPT)" --policy wan-fast --force -o $(OUT)/wan-fast.mp4
	@$(BIN)/wanfp4 generate "$(PROMPT)" --policy bf16 --force -o $(OUT)/bf16.mp4
	@$(BIN)/wanfp4 drift --policies wan-fast --prompt "$(PROMPT)" --seeds 0 --steps 10 --force -o $(OUT)/drift
	@echo
	@echo "Look at:"
	@echo "  $(OUT)/wan-fast.mp4         4-bit attention; wan-fast.json beside it says what ran"
	@echo "  $(OUT)/bf16.mp4             the same noise with the pipeline's own attention"
	@echo "  $(OUT)/drift/report.html    what 4-bit attention cost, step by step; opens offline"

# The runs of the lab's drift report and map. Six prompts tell more than three with two seeds, at the same cost.
LAB_RUNS := --prompt "a red circle moving right on a white background" \
	--prompt "a yellow star moving up on a black background" \
	--prompt "a green square moving left on a black background" \
	--prompt "a blue triangle moving down on a white background" \
	--prompt "a cyan star moving right and a red circle moving left on a white background" \
	--prompt "a purple cross moving up and an orange square moving down on a black background" --seeds 0 --steps 10
LAB_POLICIES := wan-fast wan-two-piece nvfp4 fp8-direct
comma := ,
empty :=
LAB_LIST := $(subst $(empty) $(empty),$(comma),$(LAB_POLICIES))

lab: $(STAMP) ## the quality lab on the bundled model, one page in out/lab: about 20 minutes on 2 cores
	@$(BIN)/wanfp4 drift --policies $(LAB_LIST) $(LAB_RUNS) --force -o $(LAB)/drift
	@$(BIN)/wanfp4 map --policy wan-fast --attribution $(LAB_RUNS) --force -o $(LAB)/map
	@shapes=$$($(BIN)/python -c "import torch; print('' if torch.cuda.is_available() else '--shape 567x2')"); \
		$(BIN)/wanfp4 bench $$shapes $(addprefix --policy ,$(LAB_POLICIES)) --force --json $(LAB)/bench.json
	@$(BIN)/wanfp4 drift --task --clips 16 --steps 10 --policies $(LAB_LIST) --force -o $(LAB)/task
	@$(BIN)/wanfp4 report page $(LAB)/drift --map $(LAB)/map --task $(LAB)/task --bench $(LAB)/bench.json \
		--force -o $(LAB)/lab.html

test: $(STAMP) ## all tests, in JOBS processes
	@$(BIN)/pytest -n $(JOBS) --dist worksteal

lint: $(STAMP) ## ruff, and mypy --strict on an installed copy
	@.ci/lint $(VENV)

wheel-test: $(STAMP) ## build the wheel and test it in a clean environment
	@.ci/wheel-test $(VENV)

clean: ## remove the environment, caches and outputs
	rm -rf $(VENV) build dist out *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
