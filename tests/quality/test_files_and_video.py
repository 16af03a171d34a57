"""Files are whole or not there; clips have exactly the size, frames and colours they were given."""

import math
import subprocess

import imageio_ffmpeg
import numpy as np
import pytest
from PIL import Image

from wanfp4.errors import OutputError
from wanfp4.quality import files, video


def clip(frames=7, height=48, width=64, seed=0):
    """Smooth frames, as noise would not survive any codec."""
    y, x = np.mgrid[0:height, 0:width]
    phase = np.random.default_rng(seed).uniform(0, 6, 3)
    stack = [[127 + 120 * np.sin(x / 17 + y / 23 + t / 3 + p) for p in phase] for t in range(frames)]
    return np.moveaxis(np.array(stack), 1, -1).astype(np.uint8)


def read(path):
    """Frames, and what ffmpeg says of the file."""
    run = subprocess.run([imageio_ffmpeg.get_ffmpeg_exe(), "-i", path, "-f", "rawvideo", "-pix_fmt", "rgb24", "-"],
                         capture_output=True, check=True)  # fmt: skip
    return np.frombuffer(run.stdout, np.uint8), run.stderr.decode()


@pytest.mark.parametrize(("height", "width"), [(48, 64), (80, 112), (50, 70), (33, 45)])
def test_mp4_has_the_size_frames_and_rate_asked_for(tmp_path, height, width):
    frames = clip(9, height, width)
    path = video.write_mp4(tmp_path / "a.mp4", frames, 12)
    raw, said = read(path)
    assert raw.size == frames.size
    assert f"{width}x{height}" in said
    assert "12 fps" in said
    back = raw.reshape(frames.shape).astype(int)
    assert np.abs(back - frames).mean() < 4
    assert [p.name for p in tmp_path.iterdir()] == ["a.mp4"]


def test_mp4_keeps_colours(tmp_path):
    frames = np.zeros((5, 64, 96, 3), np.uint8)
    frames[:, :, :48], frames[:, :, 48:] = (200, 30, 40), (20, 180, 90)
    raw, said = read(video.write_mp4(tmp_path / "a.mp4", frames, 16))
    back = raw.reshape(frames.shape).astype(int)
    assert np.abs(back[2, 32, 20] - (200, 30, 40)).max() <= 4
    assert np.abs(back[2, 32, 76] - (20, 180, 90)).max() <= 4
    assert "bt709" in said


def test_a_single_frame_is_a_clip(tmp_path):
    raw, _ = read(video.write_mp4(tmp_path / "a.mp4", clip(1), 16))
    assert raw.size == clip(1).size


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_an_mp4_that_fails_halfway_leaves_nothing(tmp_path, monkeypatch, error):
    writer = type(video.imageio.get_writer(tmp_path / "probe.mp4", format="FFMPEG", fps=1))
    (tmp_path / "probe.mp4").unlink(missing_ok=True)
    original, calls = writer.append_data, []

    def fail_later(self, *args):
        calls.append(1)
        if len(calls) == 3:
            raise error
        return original(self, *args)

    monkeypatch.setattr(writer, "append_data", fail_later)
    (tmp_path / "a.mp4").write_bytes(b"earlier")
    with pytest.raises(error):
        video.write_mp4(tmp_path / "a.mp4", clip(), 16)
    assert [p.name for p in tmp_path.iterdir()] == ["a.mp4"]
    assert (tmp_path / "a.mp4").read_bytes() == b"earlier"


def test_what_cannot_be_written_is_a_sentence(tmp_path):
    (tmp_path / "file").write_text("x")
    for call in (
        lambda: video.write_mp4(tmp_path / "file" / "a.mp4", clip(), 16),
        lambda: files.write(tmp_path / "file" / "a.txt", "x"),
        lambda: files.write(tmp_path, "x"),
        lambda: files.writable_folder(tmp_path / "file"),
        lambda: files.writable_folder(tmp_path / "file" / "below"),
        lambda: files.writable_folder("/proc/wanfp4"),
        lambda: video.write_mp4(tmp_path / "a.gif", clip(), 16),
    ):
        with pytest.raises(OutputError, match=r"cannot write|must end in \.mp4"):
            call()
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_a_full_disk_is_a_sentence(tmp_path, monkeypatch):
    def full(self, data):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pathlib.Path.write_bytes", full)
    with pytest.raises(OutputError, match=r"cannot write .*a\.txt.*No space left"):
        files.write(tmp_path / "a.txt", "x")
    assert list(tmp_path.iterdir()) == []


def test_frames_must_be_frames(tmp_path):
    for bad in (clip().astype(float), clip()[0], clip()[:0], clip()[..., :2]):
        with pytest.raises(ValueError, match=r"uint8 \[T, H, W, 3\]"):
            video.write_mp4(tmp_path / "a.mp4", bad, 16)


def test_files_get_the_usual_permissions(tmp_path):
    (tmp_path / "plain").write_text("x")
    files.write(tmp_path / "ours", "x")
    assert (tmp_path / "ours").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_strip_shows_first_and_last_frame_side_by_side():
    frames = clip(33, 48, 64)
    strip = video.strip(frames, count=8, gap=4)
    assert strip.shape == (48, 8 * 64 + 7 * 4, 3)
    assert np.array_equal(strip[:, :64], frames[0])
    assert np.array_equal(strip[:, -64:], frames[-1])
    assert (strip[:, 64:68] == 128).all()
    assert video.strip(frames[:3]).shape == (48, 3 * 64 + 2 * 3, 3)
    assert np.array_equal(video.strip(frames[:1]), frames[0])


def test_strip_scales_large_frames_down():
    frames = clip(5, 120, 400)
    strip = video.strip(frames, count=5, width=200)
    assert strip.shape == (60, 5 * 200 + 4 * 3, 3)
    small = frames[0].reshape(60, 2, 200, 2, 3).mean((1, 3))
    assert np.abs(strip[:, :200] - small).mean() < 2


def test_jpeg_is_the_image(tmp_path):
    image = clip()[0]
    (tmp_path / "a.jpg").write_bytes(video.encode_jpeg(image))
    with Image.open(tmp_path / "a.jpg") as back:
        error = np.asarray(back).astype(float) - image
    assert 10 * math.log10(255**2 / np.mean(error**2)) > 30
