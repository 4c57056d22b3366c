"""What a finished run hands over: evaluation, gates in their order, exports read back, and probes."""

from __future__ import annotations

import contextlib
import json
import shutil
from pathlib import Path

import pytest
import torch

from firstlight.base.errors import ModelFileError
from firstlight.drafter.baselines import NEXT_LAYERS, OWN_LAYERS
from firstlight.drafter.capture import CaptureSettings
from firstlight.drafter.evaluate import EAGLE, IN_DOMAIN, UNTRAINED, Line, Report, evaluate, read_report
from firstlight.drafter.evaluate_settings import EvaluateSettings
from firstlight.drafter.export import ENGINES, GGUF, NATIVE, RECIPE, export
from firstlight.drafter.gate_record import GateRecord, forced_gates
from firstlight.drafter.gates import Check, Gate, check
from firstlight.drafter.gates_after import engine_gate, gates_of_export, gates_of_results
from firstlight.drafter.probes import check_probes
from firstlight.drafter.stages import read_manifest
from firstlight.drafter.target import Target, read_ends
from firstlight.drafter.train import train
from firstlight.drafter.train_settings import Limits, TrainSettings
from firstlight.loading.tensor_file import read_tensor_file, write_tensor_file
from firstlight.models.eagle3_file import load_eagle3
from support.drafters import LAYERS, captured_run
from support.fault_plants import fc_skipped

Run = tuple[Path, Target]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    out, target = captured_run(tmp_path_factory.mktemp("run"), max_tokens=40)
    settings = TrainSettings(
        draft_vocab_size=60, epochs=4, row_tokens=128, rows_per_step=2, warmup_share=0.0, learning_rate=1e-2
    )
    train(out, target, settings, Limits())
    evaluate(out, target, EvaluateSettings(max_documents=2))
    export(out, target)
    return out, target


@pytest.mark.parametrize("engine", ENGINES)
def test_every_export_is_the_same_drafter(run: Run, engine: str) -> None:
    out, target = run
    embedding = read_ends(target.checkpoint).embedding
    folder = out / "export" / engine
    loaded = load_eagle3(folder, target.checkpoint.description, embedding)
    native = load_eagle3(out / "export" / NATIVE, target.checkpoint.description, embedding)
    assert loaded.drafter.config == native.drafter.config
    assert loaded.drafter.config.state_layers == LAYERS
    assert check_probes(folder, target, embedding) == "12 of 12 probed drafts equal"
    card = (folder / "README.md").read_text()
    assert target.record.weights_sha256 in card
    assert "| eagle3 | in domain" in card


def test_the_recipe_for_gguf_stands_beside_ids_that_its_converter_finds(run: Run) -> None:
    folder = run[0] / "export" / GGUF
    config = json.loads((folder / "config.json").read_text())
    assert config["eagle_aux_hidden_state_layer_ids"] == list(LAYERS)
    assert "eagle_config" not in config
    # The tiny target has two states, and llama.cpp knows drafters of three.
    assert "llama.cpp does not run this drafter: it has 2 states" in (folder / RECIPE).read_text()


def test_other_trainings_stand_beside(run: Run, tmp_path: Path) -> None:
    out, target = run
    other, main = tmp_path / "one-step", tmp_path / "main"
    shutil.copytree(out, main)
    shutil.copytree(out / "capture", other / "capture")
    train(other, target, TrainSettings(draft_vocab_size=60, num_steps=1, epochs=1), Limits())
    shutil.rmtree(main / "evaluate")
    evaluate(main, target, EvaluateSettings(max_documents=1, beside=(str(other),)))
    assert "one-step (T = 1)" in {line.drafter for line in read_report(main).lines}


def test_the_next_blocks_states_are_measured_too(tmp_path: Path) -> None:
    states = CaptureSettings(layers=(0,), dtype="float32")
    out, target = captured_run(tmp_path, states=states)
    train(out, target, TrainSettings(draft_vocab_size=60, epochs=1), Limits())
    evaluate(out, target, EvaluateSettings(max_documents=2, off_by_one=2))
    lines = {(line.drafter, line.group): line for line in read_report(out).lines}
    groups = {group for name, group in lines if name == NEXT_LAYERS}
    assert groups
    for group in groups:
        ours, again = lines["eagle3", group], lines[OWN_LAYERS, group]
        assert (ours.documents, ours.acceptance_length) == (again.documents, again.acceptance_length)


def test_probes_notice_a_wrong_weight_and_another_embedding(run: Run, tmp_path: Path) -> None:
    out, target = run
    embedding = read_ends(target.checkpoint).embedding
    folder = tmp_path / "native"
    shutil.copytree(out / "export" / NATIVE, folder)
    with pytest.raises(ModelFileError, match="drafts differ from what was stored"):
        check_probes(folder, target, torch.randn_like(embedding))
    tensors = read_tensor_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors["lm_head.weight"].flip(0).contiguous()
    write_tensor_file(folder / "model.safetensors", tensors, {})
    with pytest.raises(ModelFileError, match="drafts differ from what was stored"):
        check_probes(folder, target, embedding)


def test_the_gates_come_in_their_order_and_all_open(run: Run) -> None:
    out, target = run
    gates = [one.measure() for one in check(out, target)]
    assert [(gate.name, gate.passed) for gate in gates] == [
        ("states equal the reference", True),
        ("the last state is the teacher", True),
        ("one answer is learnt by heart", True),
        ("training equals serving", True),
    ], gates
    assert "in the engine" in gates[2].said
    assert [gate.name for gate in gates] == [one.name for one in check(out, target)]
    probe, engine = (one.measure() for one in gates_of_export(out, target, 3))
    assert (probe.name, probe.passed) == ("export probe", True), probe.said
    assert (engine.name, engine.state) == ("engine acceptance", "too few to judge"), engine.said


def test_an_engine_that_drafts_otherwise_closes_its_gate(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    fc_skipped(monkeypatch)
    gate = engine_gate(*run, 3, "stock")
    assert not gate.passed
    assert "(integration)" in gate.said


def report(first: float = 0.6, predicted: float = 2.2, loop: float = 2.2, untrained: float = 1.1) -> Report:
    values = {"group": IN_DOMAIN, "k": 3, "documents": 30, "tokens": 2000, "accepted_share": 0.4}
    lines = [
        Line(
            drafter=name,
            acceptance_length=length,
            low=length - 0.1,
            high=length + 0.1,
            by_position=[],
            conditional=[],
            **values,
        )
        for name, length in ((EAGLE, loop), (UNTRAINED, untrained))
    ]
    forced = {"accuracy": [first], "predicted_acceptance_length": predicted, "k": 3}
    return Report(step=9, lines=lines, teacher_forced={IN_DOMAIN: forced})


@pytest.mark.parametrize(
    ("changes", "closed", "words"),
    [
        ({}, "", ""),
        ({"first": 0.2}, "offline accuracy", "too little data"),
        ({"predicted": 3.0}, "own loop", "worse than those of training"),
        ({"untrained": 2.3}, "own loop", "nothing better"),
    ],
)
def test_results_open_their_gates_or_say_why_not(changes: dict[str, float], closed: str, words: str) -> None:
    gates = [one.measure() for one in gates_of_results(report(**changes))]
    assert [gate.name for gate in gates] == ["offline accuracy", "own loop"]
    assert [gate.name for gate in gates if not gate.passed] == ([closed] if closed else [])
    assert words in " ".join(gate.said for gate in gates)


def test_one_held_out_answer_is_too_few_to_judge(run: Run, tmp_path: Path) -> None:
    """Neither open nor closed, whatever its figures: it stops nothing, and the card says so."""
    for first in (0.0, 0.9):
        few = report(first=first)
        for line in few.lines:
            line.documents, line.tokens = 1, 40
        for one in gates_of_results(few):
            gate = one.measure()
            assert (gate.state, gate.passed, gate.stops) == ("too few to judge", False, False)
            assert "1 answers with 40 tokens; it takes 30 and 2,000" in gate.said
    out, target = tmp_path / "run", run[1]
    shutil.copytree(run[0], out)
    said: list[str] = []
    GateRecord(out, target, said.append).require(gates_of_results(few))
    assert said[0].startswith("gate offline accuracy (too few to judge): ")
    export(out, target, (NATIVE,))
    assert "## Gates that had too little to judge by" in (out / "export" / NATIVE / "README.md").read_text()


def test_a_closed_gate_ends_the_run_and_force_is_seen_by_all(run: Run, tmp_path: Path) -> None:
    out, target = tmp_path / "run", run[1]
    shutil.copytree(run[0], out)
    closed = [gone_through("first", "fine"), gone_through("second", "not so.", passed=False)]
    said: list[str] = []
    with pytest.raises(ModelFileError, match="The gate 'second' is closed: not so"):
        GateRecord(out, target, said.append).require(closed)
    assert said == ["gate first (open): fine", "gate second (closed): not so."]
    assert forced_gates(out) == {}
    GateRecord(out, target, said.append, force=True).require(closed)
    assert said[-1] == "gate second (closed, FORCED): not so."
    assert forced_gates(out) == {"second": "not so."}
    export(out, target, (NATIVE,))
    assert read_manifest(out / "export").numbers["forced_gates"] == {"second": "not so."}
    card = (out / "export" / NATIVE / "README.md").read_text()
    assert "passed by force" in card
    assert "## Gates that were open\n\n- first: fine" in card


def gone_through(name: str, said: str, of: str = "", *, passed: bool = True) -> Check:
    return Check(name, of, lambda: Gate(name=name, passed=passed, said=said))


def test_an_open_gate_is_not_measured_again_unless_something_changed(run: Run, tmp_path: Path) -> None:
    out, target = tmp_path / "run", run[1]
    shutil.copytree(run[0], out)
    said: list[str] = []

    def require(*checks: Check) -> list[str]:
        said.clear()
        with contextlib.suppress(ModelFileError):
            GateRecord(out, target, said.append).require(checks)
        return said

    require(gone_through("first", "once", "a"), gone_through("second", "no.", "a", passed=False))
    again = gone_through("first", "twice", "a"), gone_through("second", "yes", "a")
    assert require(*again) == ["gate first (open, measured before): once", "gate second (open): yes"]
    assert require(gone_through("first", "other", "b")) == ["gate first (open): other"]


def test_what_a_gate_measures_is_told_by_files_target_and_attention(run: Run) -> None:
    out, target = run
    same, other = check(out, target), check(out, target, "latent")
    assert [one.of for one in check(out, target)] == [one.of for one in same]
    assert not {one.of for one in same} & {one.of for one in other}
    engine = [gates_of_export(out, target, k)[1].of for k in (3, 3, 2)]
    assert engine[0] == engine[1] != engine[2]


def test_an_export_of_half_a_training_says_so(run: Run, tmp_path: Path) -> None:
    out, target = tmp_path / "run", run[1]
    shutil.copytree(run[0], out)
    manifest = out / "train" / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"complete": true', '"complete": false'))
    said = export(out, target, (NATIVE,)).manifest.numbers["unfinished"]
    assert "training was stopped at step" in said
    assert "no gate was gone through" in said
    assert "stopped before its end" in (out / "export" / NATIVE / "README.md").read_text()
