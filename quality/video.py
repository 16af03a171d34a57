"""Clips as files: mp4 for players, strips of frames for pages."""

from __future__ import annotations

import contextlib
import tempfile
from pathlib import Path

import imageio.v2 as imageio
import numpy as np
import numpy.typing as npt
from skimage.transform import resize

from wanfp4.errors import OutputError
from wanfp4.quality.files import replacing
from wanfp4.quality.metrics import Clip

Image = npt.NDArray[np.uint8]

# Without a matrix named in the file, ffmpeg writes BT.601 and players read HD as BT.709: colours would shift.
_OUTPUT = ["-crf", "18", "-vf", "scale=out_color_matrix=bt709:out_range=tv", "-movflags", "+faststart"]
_OUTPUT += ["-colorspace", "bt709", "-color_primaries", "bt709", "-color_trc", "bt709", "-color_range", "tv"]


def write_mp4(path: str | Path, frames: Clip, fps: float) -> Path:
    """`frames` [T, H, W, 3] uint8 as H.264 at `fps` frames a second, exactly H × W pixels; returns the path.

    The file appears whole or not at all. 4:2:0 chroma, which every player takes, where both sides are even, else 4:4:4.
    Raises ValueError for other arrays, OutputError when the file cannot be written.
    """
    path = Path(path)
    if frames.ndim != 4 or frames.shape[3] != 3 or frames.dtype != np.uint8 or not frames.size:
        raise ValueError(f"frames must be uint8 [T, H, W, 3], not empty; found {frames.dtype} {list(frames.shape)}")
    if path.suffix.lower() != ".mp4":
        raise OutputError(f"{path.name!r} is not an mp4 file name; it must end in .mp4")
    odd = frames.shape[1] % 2 or frames.shape[2] % 2
    with replacing(path) as temporary:
        writer = imageio.get_writer(
            temporary,
            format="FFMPEG",
            fps=fps,
            codec="libx264",
            quality=None,
            pixelformat="yuv444p" if odd else "yuv420p",
            macro_block_size=1,  # or imageio resizes to multiples of 16, unless a filter of ours stands in its way
            ffmpeg_log_level="error",
            output_params=_OUTPUT,
        )
        # The writer's own `with` does not close it on an error, and ffmpeg would go on to write the file.
        with contextlib.closing(writer):
            for frame in frames:
                writer.append_data(frame)
    return path


def encode_mp4(frames: Clip, fps: float) -> bytes:
    """The bytes that `write_mp4` writes."""
    with tempfile.TemporaryDirectory(prefix="wanfp4-") as folder:
        return write_mp4(Path(folder) / "clip.mp4", frames, fps).read_bytes()


def strip(frames: Clip, count: int = 8, width: int = 200, gap: int = 3) -> Image:
    """`count` frames, the first and the last among them, evenly spaced side by side: [H', W', 3] uint8.

    Frames wider than `width` pixels are scaled down; fewer frames than `count` are all shown. The gaps are grey.
    """
    picked = frames[np.unique(np.linspace(0, len(frames) - 1, count).round().astype(int))]
    height, full_width = picked.shape[1:3]
    if full_width > width:
        size = (max(1, round(height * width / full_width)), width)
        picked = np.stack([resize(frame, size, anti_aliasing=True) * 255 for frame in picked]).round().astype(np.uint8)
    space = np.full((picked.shape[1], gap, 3), 128, np.uint8)
    parts = [part for frame in picked for part in (space, frame)][1:]
    return np.concatenate(parts, axis=1)


def encode_jpeg(image: Image) -> bytes:
    """`image` [H, W, 3] uint8 as JPEG, quality 88."""
    return bytes(imageio.imwrite("<bytes>", image, format="JPEG", quality=88))
