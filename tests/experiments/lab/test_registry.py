"""The interface of studies, for any content of their files."""

from types import SimpleNamespace

from experiments.lab import registry


def test_names_of_figures_are_safe_for_files(monkeypatch):
    study = registry.load("transfer_phase")
    plots = SimpleNamespace(plot=lambda dataset: {"by_sigma0.2": 1, "../1e+20": 2, "plain-1_x": 3})
    monkeypatch.setattr(registry.Study, "_in", lambda self, file: plots)
    assert study.plot(None) == {"by_sigma0_2": 1, "___1e_20": 2, "plain-1_x": 3}
