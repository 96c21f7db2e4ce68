"""Tests on a finished run whether averages of checkpoints can replace decay; tabulates both.

Windows are chosen on one half of the held-out examples and evaluated on the other.
"""

import xarray as xr

from experiments.lab.findings import Finding, agrees, corrected, judged, mean_and_error, stated

WSM, PMA = "WSM, arXiv 2507.17634", "PMA, arXiv 2505.12082"
THEORY = "theory.merging.averaging"
TASKS = {"text": "GPT", "images": "ResNet"}
# The average that corresponds to a decay.
SHAPES = {"linear": "uniform"}


def at_best(losses: xr.DataArray) -> xr.DataArray:
    """Returns the loss on "test" at the window that is best on "fit", for each repetition."""
    best = losses.sel(half="fit").argmin("window")
    return losses.sel(half="test").isel(window=best)


def equality(dataset: xr.Dataset) -> xr.DataArray:
    """Predicts each decayed run by its corresponding average, measured on "fit".

    Returns losses by task, seed, decay and window, for the decays with a measured average.
    """
    shapes = dataset["shape"].values.astype(str)
    known = [d for d in dataset["decay"].values.astype(str) if SHAPES.get(d, d) in shapes]
    averages = dataset["averaged"].sel(half="fit", shape=[SHAPES.get(d, d) for d in known])
    return averages.rename(shape="decay").assign_coords(decay=known) + dataset["offset"]


def misses(dataset: xr.Dataset) -> dict[str, xr.DataArray]:
    """Computes the mean errors of predictions of the decayed runs.

    Returns the mean absolute error on "test", by task and seed: of the quadratics fitted to
    averages ("predicted"), of `equality` ("equal"), and of quadratics also fitted to the decayed
    runs ("fitted").
    """
    same, offset = equality(dataset), dataset["offset"]
    decays = same["decay"]
    guesses = {
        "predicted": dataset["predicted_decayed"].sel(decay=decays) + offset,
        "equal": same,
        "fitted": dataset["fitted_decayed"].sel(decay=decays) + offset,
    }
    decayed = dataset["decayed"].sel(half="test", decay=decays)
    return {name: abs(x - decayed).mean(("decay", "window")) for name, x in guesses.items()}


def findings(dataset: xr.Dataset) -> list[Finding]:
    """Tests for each task how averages compare with decay, and which model predicts decayed runs.

    Returns six findings for each task, judged together.
    """
    declared = []
    errors = misses(dataset)
    for task in dataset["task"].values.astype(str):
        of, net = dataset.sel(task=task), TASKS[task]
        last = of["curve"].isel(step=-1)
        uniform, linear = (of["averaged"].isel(shape=0), of["decayed"].isel(decay=0))
        average, decay = str(of["shape"].values[0]), str(of["decay"].values[0])
        gain = last.sel(half="test") - at_best(uniform)
        declared.append(
            judged(
                PMA,
                f"{net}: the {average} average at its best window has less loss than the last "
                "checkpoint",
                "as annealed",
                f"{stated(gain, 4)} nats less",
                gain.values,
            )
        )
        more = at_best(uniform) - at_best(linear)
        declared.append(
            judged(
                WSM,
                f"{net}: {decay} decay at its best window has less loss than the {average} average "
                "at its own",
                "the average has better scores",
                f"{stated(more, 4)} nats less",
                more.values,
            )
        )
        behind = (uniform - linear).sel(half="test")
        for at, name in ((0, "shortest"), (-1, "longest")):
            gap, window = behind.isel(window=at), int(of["window"][at])
            gained = float((last - linear).sel(half="test").isel(window=at).mean())
            declared.append(
                agrees(
                    WSM,
                    f"{net}: over the {name} window, {window} steps, the average gains as much "
                    "as decay",
                    "taken as equal",
                    (1 - gap / gained).values,
                    1.0,
                )
            )
        longer = behind.isel(window=-1) - behind.isel(window=0)
        declared.append(
            judged(
                THEORY,
                f"{net}: over the longest window the average is further behind decay than over the "
                f"shortest",
                "it keeps old bias",
                f"{stated(longer, 4)} nats further",
                longer.values,
            )
        )
        quadratic, same = (errors[name].sel(task=task) for name in ("predicted", "equal"))
        better = same - quadratic
        ours = (stated(error, 4, sign=False) for error in (quadratic, same))
        declared.append(
            judged(
                THEORY,
                f"{net}: fitted quadratics predict decayed losses better than the average itself",
                "not compared",
                " against ".join(ours) + " nats off",
                better.values,
            )
        )
    return corrected(declared)


def table(dataset: xr.Dataset) -> list[tuple[str, ...]]:
    """Tabulates the loss on "test" of every average and decay.

    Returns a row of column names and a row for each task and kind of run: the loss over each
    window, mean and standard error, and on the next row the quadratic's prediction.
    """
    windows = [str(w) for w in dataset["window"].values]
    rows = [("network", "way", *windows)]
    for task in dataset["task"].values.astype(str):
        of = dataset.sel(task=task)
        for kind, ways in (("averaged", "shape"), ("decayed", "decay")):
            for way in of[ways].values.astype(str):
                pick = {ways: way}
                mean, error = mean_and_error(of[kind].sel(pick).sel(half="test"))
                cells = (f"{m:.4f} ± {e:.4f}" for m, e in zip(mean, error, strict=True))
                rows.append((TASKS[task], f"{way} {kind}", *cells))
                guess = (of[f"predicted_{kind}"].sel(pick) + of["offset"]).mean("seed").values
                rows.append((TASKS[task], "predicted", *(f"{m:.4f}" for m in guess)))
        mean, error = mean_and_error(of["curve"].isel(step=-1).sel(half="test"))
        last = f"{mean:.4f} ± {error:.4f}"
        rows.append((TASKS[task], "last checkpoint", last, *("" for _ in windows[1:])))
    return rows


def summary(dataset: xr.Dataset) -> str:
    """Describes the losses of averages and decays at their best, and both predictions.

    Returns a sentence for each task.
    """
    errors = misses(dataset)
    sentences = []
    for task in dataset["task"].values.astype(str):
        of = dataset.sel(task=task)
        last = of["curve"].isel(step=-1).sel(half="test")
        ways = (last, at_best(of["averaged"].isel(shape=0)), at_best(of["decayed"].isel(decay=0)))
        off = (error.sel(task=task) for error in errors.values())
        figures = [stated(values, 4, sign=False) for values in (*ways, *off)]
        sentences.append(
            f"{TASKS[task]}: the last checkpoint has a loss of {figures[0]}, the "
            f"{of['shape'].values[0]} average over the best window {figures[1]}, and "
            f"{of['decay'].values[0]} decay over the best window {figures[2]} nats. Mean errors of "
            f"predicted decayed losses: {figures[3]} for quadratics fitted to averages, "
            f"{figures[4]} for the averages themselves, and {figures[5]} for quadratics also "
            "fitted "
            f"to the decayed runs (mean ± s.e. over {last.size} seeds)."
        )
    return " ".join(sentences)
