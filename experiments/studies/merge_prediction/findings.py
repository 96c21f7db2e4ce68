"""What `merge_prediction` found: from the stored dataset alone."""

import xarray as xr

from experiments.studies.merge_prediction import plots as figures
from experiments.studies.merge_prediction import probes


def summary(dataset: xr.Dataset) -> str:
    """Which predictors rank the outcomes of averaging, in each family and across them."""
    n, families = dataset.sizes["merge"], dataset["learned"].values
    lines = []
    ordinary = "all, tuned" if bool(dataset["within"].sel(scope="all, tuned").sum() > 2) else "all"
    for scope in dict.fromkeys([*families, "all", ordinary]):
        some = dataset.sel(scope=scope, outcome="averaging")
        order = [p for p in figures.order(some) if p != "sample"]
        said = [_said(some, p) for p in order[:4]]
        lines.append(f"{scope} ({int(some['within'].sum())} merges): {', '.join(said)}")
    some = dataset.sel(scope=ordinary, outcome="averaging")
    names = figures.order(some)[::-1]
    low, high = (
        dict(zip(some["predictor"].values, some[x].values, strict=True)) for x in ("low", "high")
    )
    wrong = [_said(some, p) for p in names if high[p] < 0]
    blind = [_said(some, p) for p in names if low[p] <= 0 <= high[p]]
    told = [("The wrong way round there", wrong), ("Not told from chance there", blind)]
    words = "".join(f"{what}: {', '.join(those)}. " for what, those in told if those)
    sample = some.sel(predictor="sample")
    return (
        f"{n} merges; Spearman's correlation with the loss that averaging adds to the experts' "
        f"own, 95 % intervals over base models. Best of {', then of '.join(lines)}. {words}"
        f"To run the merge itself on {probes.PROBED} examples of each task gives "
        f"{float(sample['rho']):.2f} [{float(sample['low']):.2f}, {float(sample['high']):.2f}]."
    )


def _said(some: xr.Dataset, predictor: str) -> str:
    one = some.sel(predictor=predictor)
    label = probes.PREDICTORS[predictor].label
    return f"{label} {float(one['rho']):.2f} [{float(one['low']):.2f}, {float(one['high']):.2f}]"
