"""`graphed_training.py` and `run_groups.py`: training side by side is training alone; calls that end in time."""

import argparse
import math
from types import SimpleNamespace

import pytest
import torch
from lightning import Trainer

from experiments.harness import classifier_runs as runs
from experiments.harness import graphed_training as training
from experiments.harness import run_groups as groups
from experiments.harness import run_table as table
from headmix_vision.training.callbacks.ema import EmaWithWarmup

pytestmark = pytest.mark.usefixtures("few_digits")

SMALL = '{"embed_dim": 16, "depth": 1, "num_heads": 2, "patch_size": 4, "block_grid": 2}'


def command(seed: int = 0, epochs: int = 2, rate: float = 1e-2, core: str = "mhla") -> list[str]:
    """Options of a small network; two steps an epoch of the few digits."""
    options = ["-c", "digits", "--model.name", f"deit_{core}_digits", "--model.model_args", SMALL]
    options += ["--seed_everything", str(seed), "--trainer.max_epochs", str(epochs), "--data.batch_size", "32"]
    return [*options, "--model.optimizer.lr", str(rate), "--model.schedule.warmup_epochs", "0.5"]


def test_a_training_is_that_of_lightning():
    """Batches, schedule, clipping, decay, averaging and scores, over four steps."""
    (ours,) = training.train_side_by_side([command()], torch.device("cpu"))
    torch.manual_seed(0)
    options = training._parser().instantiate_classes(
        training._parser().parse_args(training.with_config_paths(["fit", *command()], "cls")[1:])
    )
    quiet = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    trainer = Trainer(
        accelerator="cpu",
        max_epochs=2,
        gradient_clip_val=1.0,
        callbacks=[EmaWithWarmup(0.99)],
        use_distributed_sampler=False,
        num_sanity_val_steps=0,
        **dict.fromkeys(quiet, False),
    )
    trainer.fit(options.model, options.data)
    theirs = dict(options.model.net.named_parameters())
    for name, parameter in ours.net.named_parameters():
        torch.testing.assert_close(parameter, theirs[name], rtol=1e-4, atol=1e-6, msg=name)
    assert ours.loss == pytest.approx(options.model.epoch_loss, rel=1e-5) and ours.epochs == 2
    assert ours.top1 == ours.test_top1 == pytest.approx(float(trainer.callback_metrics["val/top1"]))


def test_trainings_side_by_side_are_those_alone_and_one_that_diverges_disturbs_none():
    commands = [command(), command(1, core="softmax"), command(rate=1e30)]
    together = training.train_side_by_side(commands, torch.device("cpu"))
    for options, beside in zip(commands[:2], together, strict=False):
        (alone,) = training.train_side_by_side([options], torch.device("cpu"))
        assert beside[:4] == alone[:4]
        for ours, theirs in zip(beside.net.parameters(), alone.net.parameters(), strict=True):
            assert torch.equal(ours, theirs)
    assert together[0].loss != together[1].loss
    assert math.isnan(together[2].top1) and math.isnan(together[2].loss) and not together[2].epochs


def test_a_training_that_has_ended_keeps_its_result():
    """A rule ends one of three after an epoch; until half of them have ended, it is trained on with the others."""
    rules = [training.Plateau(1, 1, rise=1.0), training.Plateau(0, 0), training.Plateau(0, 0)]
    ended, other, third = training.train_side_by_side(
        [command()] * 3, torch.device("cpu"), rules=rules, validate_every_n_epochs=1
    )
    (whole,) = training.train_side_by_side([command()], torch.device("cpu"))
    assert ended.epochs == 1 and other[:4] == third[:4] == whole[:4] and ended.loss > other.loss
    assert not torch.equal(ended.net.head.weight, other.net.head.weight)


def test_training_stops_on_a_plateau_but_not_on_the_first_one():
    rule = training.Plateau(patience=2, min_epochs=5)
    shares = (0.1, 0.1, 0.1, 0.3, 0.8, 0.804, 0.9, 0.902, 0.9049)
    assert [rule.ends(top1, epoch) for epoch, top1 in enumerate(shares, start=1)] == [False] * 8 + [True]


def test_an_option_that_would_not_be_heeded_is_refused():
    with pytest.raises(ValueError, match="accumulate_grad_batches"):
        training.train_side_by_side([[*command(), "--trainer.accumulate_grad_batches", "2"]], torch.device("cpu"))
    with pytest.raises(ValueError, match="mixup"):
        training.train_side_by_side([[*command(), "--model.mixup.mixup_alpha", "0.2"]], torch.device("cpu"))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.slow
def test_a_recorded_training_is_the_eager_one(monkeypatch):
    """All cores, some with mixes, over more steps than go before the recording."""
    cores = ("softmax", "linear", "mhla", "hih", "mhla_iha", "hih_mea")
    commands = [command(seed, 12, core=core) for seed, core in enumerate(cores)]
    recorded = training.train_side_by_side(commands, torch.device("cuda"), validate_every_n_epochs=4)
    monkeypatch.setattr(training, "EAGER_STEPS", 1000)
    for core, beside, options in zip(cores, recorded, commands, strict=True):
        (eager,) = training.train_side_by_side([options], torch.device("cuda"))
        assert beside.loss == pytest.approx(eager.loss, rel=1e-3), core
        for ours, theirs in zip(beside.net.parameters(), eager.net.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-2, atol=1e-3)


def any_run(seed=0, epochs=1):
    return runs.Run(runs.Network("digits", "linear", "plain"), "digits", 1e-3, seed, epochs)


def test_no_group_begins_that_would_not_end(monkeypatch):
    """Groups of two runs that take 30 s, with 80 s left: two of them; another kind is not known to be quicker."""
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(groups.time, "monotonic", lambda: clock.now)
    queue = groups.Groups(2, 80.0)
    queue.waiting = dict.fromkeys([*(any_run(seed) for seed in range(5)), any_run(epochs=2)])
    taken = []
    while group := queue.take():
        clock.now += 30
        queue.note(group[0], 30)
        taken.append([run.seed for run in group])
    assert taken == [[0, 1], [2, 3]] and [(run.seed, run.epochs) for run in queue.waiting] == [(4, 1), (0, 2)]


def test_status_names_failures_before_missing_runs(capsys):
    groups.Completion([], []).exit()
    with pytest.raises(SystemExit) as ended:
        groups.Completion([], [any_run()]).exit()
    assert ended.value.code == groups.EXIT_TIME_OVER
    with pytest.raises(SystemExit) as ended:
        groups.Completion(["digits mhla: no memory"], [any_run()]).exit()
    assert ended.value.code == groups.EXIT_FAILED
    said = capsys.readouterr().err
    assert "error: digits mhla: no memory" in said and "1 of digits linear plain" in said
    with pytest.raises(SystemExit, match="--group must be positive, got 0"):
        groups.check_options(argparse.Namespace(group=0, jobs=1))


def test_two_calls_do_not_write_the_same_table(tmp_path):
    with (
        table.open_table(tmp_path / "x.csv"),
        pytest.raises(SystemExit, match=r"x\.csv is in use by process"),
        table.open_table(tmp_path / "x.csv"),
    ):
        pass
    assert not list(tmp_path.iterdir())
