"""Figures for people who look: drawn with matplotlib, where it is installed."""

import re
from pathlib import Path
from typing import Any

from anyorder.errors import InputError

MEMBERS = re.compile(r"ensemble of (\d+)( \(paper\))?")


def demand_matplotlib() -> None:
    """Refuse a figure that could not be drawn, before the work it shows."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise InputError("a figure needs matplotlib: pip install anyorder[plots]") from None


def draw_ensembles(texts: list[dict[str, Any]], path: Path) -> None:
    """Draw perplexity against the number of context orders, a panel for each scored text, with standard errors."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import NullFormatter, ScalarFormatter

    figure, panels = pyplot.subplots(
        1, len(texts), figsize=(4.6 * len(texts), 3.4), squeeze=False, layout="constrained"
    )
    for panel, scored in zip(panels[0], texts, strict=True):
        named = {result["name"]: result for result in scored["results"]}
        members = {int(match[1]): named[name] for name in named if (match := MEMBERS.fullmatch(name))}
        panel.errorbar(
            list(members),
            [result["perplexity"] for result in members.values()],
            [result["perplexity_error"] or 0.0 for result in members.values()],
            marker="o",
            capsize=3,
            label="ensemble of context orders",
        )
        panel.axhline(named["left to right"]["perplexity"], color="black", linestyle="--", label="left to right")
        panel.set_xscale("log", base=2)
        panel.xaxis.set_major_formatter(ScalarFormatter())
        panel.xaxis.set_minor_formatter(NullFormatter())
        panel.set_xticks(list(members))
        panel.set_xlabel("orders averaged")
        panel.set_ylabel("perplexity per token")
        panel.set_title(f"{Path(scored['text']).name}, {scored['sequences']:,} sequences", fontsize=10)
        panel.legend(fontsize=8)
    try:
        figure.savefig(path, dpi=150)
    except ValueError as error:  # an ending it does not know
        raise InputError(f"--figure {path} cannot be drawn ({error}); accepted: .png, .svg or .pdf") from None
    finally:
        pyplot.close(figure)
