"""The plots of a drift report as image files, for papers and slides."""

from __future__ import annotations

from pathlib import Path

from wanfp4.errors import SettingsError
from wanfp4.quality.comparison import read_report
from wanfp4.quality.files import output_folder, write
from wanfp4.quality.pages import CHARTS, curves
from wanfp4.quality.plots import FORMATS, step_file
from wanfp4.quality.results import DAMAGE, DRIFT, changed_by_hand


def save_plots(report: str | Path, folder: str | Path, kind: str = "svg") -> list[Path]:
    """Write each plot of a finished drift report into `folder`, as QUANTITY-WAY.KIND; returns the files.

    Each is the page's plot on white with its legend. Files of these names are replaced. Raises SettingsError for what
    is no finished drift report and for a kind other than svg and png, OutputError for a folder that cannot be written.
    """
    if kind not in FORMATS:
        raise SettingsError(f"plots are made as {' or '.join(FORMATS)}, not {kind!r}")
    data = read_report(report)
    try:
        images = {
            f"{quantity}-{way.replace('_', '-')}.{kind}": step_file(
                curves(data, way, quantity), data["steps"], f"relative L2 of {quantity}", kind
            )
            for way, quantity, _, _ in CHARTS
        }
    except DAMAGE as error:
        raise changed_by_hand(report, DRIFT, error) from None
    with output_folder(folder) as made:
        return [write(made / name, content) for name, content in images.items()]
