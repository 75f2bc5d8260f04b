"""bench: measure this machine, and what the package makes of it."""

import json
from pathlib import Path
from typing import Annotated, Any, Literal

from tyro.conf import Positional, arg

from anyorder.bench.families import bench_families
from anyorder.bench.infilling import bench_infilling
from anyorder.bench.measure import machine
from anyorder.bench.sampling import bench_sampling
from anyorder.bench.speculation import bench_speculation
from anyorder.commands.shared import check_written, load_for
from anyorder.config import Precision
from anyorder.data.shards import open_dataset
from anyorder.display import counting_progress, show_rows
from anyorder.errors import InputError
from anyorder.files import write_text

What = Literal["sampling", "speculation", "infilling", "families"]


def bench(
    what: Annotated[Positional[What], arg(metavar="{sampling,speculation,infilling,families}")],
    /,
    run: Path | None = None,
    data: Path | None = None,
    preset: str = "small",
    precision: Precision = "auto",
    repeats: int = 3,
    texts: int = 64,
    json_file: Annotated[Path | None, arg(name="json")] = None,
) -> None:
    """Measure: speed of sampling, tokens a pass of exact parallel sampling, how well blanks are filled, the families.

    sampling: one text of all positions with the cache, against an encoder of the same size that reads the whole text
    for every token (some of its passes are timed, the rest extrapolated), beside the machine's own ceilings.
    speculation: tokens a pass over orders and numbers of drafts. infilling: exact matches and log-probability of
    held-out text with blanks, against writing left to right. These two need a run and data.
    families: what each family of models costs, computed from its shape and counted while it runs.

    Args:
        what: Which benchmark.
        run: A trained run, for speculation and infilling.
        data: A folder that anyorder prepare wrote, for the same.
        preset: The shape of the models that sampling and families build; their weights are random.
        precision: Number type of weights and products.
        repeats: How often each way is timed, in turn.
        texts: How many held-out texts.
        json_file: Write the figures there too.
    """
    check_written("json", json_file)
    for name, count in (("repeats", repeats), ("texts", texts)):
        if count < 1:
            raise InputError(f"{name} is {count}; accepted: 1 or more")
    figures: dict[str, Any]
    with counting_progress() as report:
        if what == "sampling":
            figures = bench_sampling(report, preset, precision, repeats)
        elif what == "families":
            figures = {"rows": bench_families(report, preset)}
        else:
            if run is None or data is None:
                raise InputError(f"bench {what} needs a model and text; accepted: --run RUN --data DATA")
            dataset = open_dataset(data)
            model, _ = load_for(run, dataset, "ema")
            measure = bench_speculation if what == "speculation" else bench_infilling
            figures = {"rows": measure(model, dataset, report, texts)}
    rows = figures.get("rows") or [{"figure": name, "value": value} for name, value in figures.items()]
    show_rows(rows)
    if json_file is not None:
        write_text(json_file, json.dumps({**machine(), **figures}, indent=1) + "\n")
