"""``patch_deepspeed``: scripts that know nothing of xmoe run on it; sections nobody reads are reported."""

import base64
import copy
import io
import json
import logging
import os
import re
import sys
import types
from pathlib import Path

import deepspeed
import pytest
import torch
from deepspeed.moe import layer as native_layer
from deepspeed.moe import utils as native_utils
from deepspeed.runtime import engine as native_engine
from ds_nets import D, Net, config, engine_of, init_distributed, local_state, mlp, train, whole_state

import xmoe
from xmoe.integrations.deepspeed import MoE, initialize, patch_deepspeed, replace_moe_layers, unread
from xmoe.integrations.deepspeed.checks import config_as_dict
from xmoe.testing import run_ranks

NativeMoE, native_initialize = native_layer.MoE, deepspeed.initialize
SCRIPT = Path(__file__).with_name("megatron_style.py")
SECTION = {"score_function": "sigmoid", "z_loss_coefficient": 1e-2}


def _run_script(folder, section, header, renamed, mlp_types=("standard", "residual")):
    init_distributed()
    text = SCRIPT.read_text(encoding="utf-8")
    for old, new in renamed.items():
        assert old in text
        text = text.replace(old, new)
    names = {"__name__": "megatron_style"}
    exec(compile(header + text, str(SCRIPT), "exec"), names)
    content = {key: value for key, value in config(stage=2, clip=0.05, xmoe=section).items() if key != "optimizer"}
    return [names["main"](f"{folder}/{mlp_type}", content, mlp_type=mlp_type) for mlp_type in mlp_types]


@pytest.mark.dist
def test_a_script_that_only_calls_the_patch_trains_and_resumes_as_one_written_for_xmoe(tmp_path):
    patch = "import xmoe\nxmoe.patch_deepspeed()\n"
    renamed = {"from deepspeed.moe.layer import MoE": "from xmoe import MoE, initialize"}
    renamed["deepspeed.initialize("] = "initialize("
    folders = [str(tmp_path / name) for name in ("patched", "written", "bare")]
    patched = run_ranks(2, _run_script, folders[0], SECTION, patch, {})
    written = run_ranks(2, _run_script, folders[1], SECTION, "", renamed)
    bare = run_ranks(2, _run_script, folders[2], {}, patch, {}, ("standard",))
    for rank in range(2):
        for found, expected in zip(patched[rank], written[rank], strict=True):
            assert found["packages"] == expected["packages"]
            assert "xmoe" in found["packages"]
            assert "deepspeed" not in found["packages"]
            for part in ("first", "rest", "resumed"):
                assert found[part] == pytest.approx(expected[part], abs=1e-6)
            assert found["resumed"] == pytest.approx(found["rest"], abs=1e-6)
            assert found["rest"] != found["first"]
        # The section was read: other scores, other losses.
        assert abs(patched[rank][0]["rest"][-1] - bare[rank][0]["rest"][-1]) > 1e-4
    saved = [sorted(path.name for path in Path(folder, "standard", "three").iterdir()) for folder in folders[:2]]
    assert saved[0] == saved[1]


@pytest.fixture
def user_module():
    module = types.ModuleType("a_users_module")
    exec("from deepspeed.moe.layer import MoE as Layer\nfrom deepspeed import initialize\nother = 1", vars(module))
    sys.modules[module.__name__] = module
    yield module
    del sys.modules[module.__name__]


def test_the_class_builds_ours_and_the_function_is_replaced_where_users_hold_them(user_module):
    registry = {"moe": NativeMoE}
    with patch_deepspeed():
        assert deepspeed.initialize is user_module.initialize is initialize
        for held in (native_layer.MoE, user_module.Layer, registry["moe"]):
            layer = held(D, mlp(), num_experts=4, k=2)
            assert type(layer) is MoE
            assert isinstance(layer, held)
        # What DeepSpeed asks with, early or late, is true of both layers.
        assert native_layer.MoE is native_engine.MoE is native_utils.MoE is NativeMoE
        assert native_utils.has_moe_layers(torch.nn.Sequential(layer)) == (True, 4)
    assert deepspeed.initialize is user_module.initialize is native_initialize
    assert type(native_layer.MoE(D, mlp(), 4)) is NativeMoE
    assert type(MoE(D, mlp(), 4)) is MoE


def test_a_second_patch_changes_nothing_and_undoes_nothing(user_module):
    first = patch_deepspeed()
    try:
        with xmoe.patch_deepspeed():
            assert type(NativeMoE(D, mlp(), 4)) is MoE
        assert deepspeed.initialize is initialize
        assert type(NativeMoE(D, mlp(), 4)) is MoE
        user_module.initialize = "bound anew"
    finally:
        first.undo()
    assert user_module.initialize == "bound anew"
    assert deepspeed.initialize is native_initialize
    assert type(NativeMoE(D, mlp(), 4)) is NativeMoE
    with patch_deepspeed():
        first.undo()  # an old one
        assert type(NativeMoE(D, mlp(), 4)) is MoE


class Derived(NativeMoE):
    def __init__(self):
        super().__init__(D, mlp(), 4)


def test_derived_classes_and_copies_of_native_layers_stay_native():
    native = NativeMoE(D, mlp(), 4)
    saved = io.BytesIO()
    torch.save(native, saved)
    with patch_deepspeed():
        saved.seek(0)
        for layer in (Derived(), copy.deepcopy(native), torch.load(saved, weights_only=False)):
            assert isinstance(layer, NativeMoE)
            assert not isinstance(layer, MoE)
        assert type(copy.deepcopy(NativeMoE(D, mlp(), 4))) is MoE


def test_layers_built_before_the_patch_are_converted_under_it():
    model = torch.nn.Sequential(NativeMoE(D, mlp(), 4))
    with patch_deepspeed():
        assert replace_moe_layers(model) == 1
    assert isinstance(model[0], MoE)


class _Records(logging.Handler):
    def __init__(self, name):
        super().__init__()
        self.messages = []
        logging.getLogger(name).addHandler(self)

    def emit(self, record):
        self.messages.append(record.getMessage())


def _engines(section):
    init_distributed()
    records = _Records("xmoe.integrations.deepspeed")
    options = {"ep_size": 2, "drop_tokens": False, "top2_2nd_expert_sampling": False}
    said = []
    for native in (True, True, False):
        net = Net(**options)
        net.load_state_dict(local_state(whole_state(), net))
        content = config(**({} if section is None else {"xmoe": section}))
        losses = train(engine_of(net, native=native, ds=content), range(1))
        said.append((losses, list(records.messages)))
        records.messages.clear()
    engine_of(Net(NativeMoE, **options))
    said.append(list(records.messages))
    return said


@pytest.mark.dist
def test_a_section_that_nobody_reads_warns_once():
    first, second, read, native_layers = run_ranks(2, _engines, SECTION)[0]
    assert len(first[1]) == 1
    assert re.search(r'"xmoe" section .* is not read by deepspeed.initialize: call xmoe.initialize', first[1][0])
    assert first[0] == second[0]
    assert read[0] != first[0]
    assert (second[1], read[1]) == ([], [])
    assert len(native_layers) == 1
    assert re.search(r"2 MoE layers \(first: 'a'\) are DeepSpeed's own", native_layers[0])


@pytest.mark.dist
def test_without_a_section_nothing_warns():
    for rank in run_ranks(2, _engines, None):
        assert [messages for _, messages in rank[:3]] == [[], [], []]


def test_a_layer_of_its_own_warns_of_nothing():
    unread.warn_of_unread_section()
    assert not unread._warned


@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")  # DeepSpeed's reader leaves them open
def test_a_config_is_read_as_deepspeed_reads_it(tmp_path):
    commented = tmp_path / "ds_config.json"
    commented.write_text('{\n  # a comment\n  "xmoe": {"z_loss_coefficient": 0.5},  // and another\n  "a": [1, 2,],\n}')
    expected = {"xmoe": {"z_loss_coefficient": 0.5}, "a": [1, 2]}
    encoded = base64.urlsafe_b64encode(json.dumps(expected).encode()).decode()
    for given in (str(commented), commented, encoded, expected):
        assert config_as_dict(given, None) == expected
        assert config_as_dict(None, types.SimpleNamespace(deepspeed_config=given)) == expected
    (tmp_path / "broken.json").write_text("{")
    (tmp_path / "list.json").write_text("[1]")
    for name, message in (("broken.json", "not valid JSON"), ("list.json", "JSON object"), ("no.json", "No such file")):
        with pytest.raises(xmoe.ConfigError, match=message):
            config_as_dict(str(tmp_path / name), None)


@pytest.mark.parametrize(
    ("variables", "by_mpi"),
    [({}, False), ({"PMI_SIZE": "1"}, False), ({"PMI_SIZE": "2"}, True), ({"OMPI_COMM_WORLD_SIZE": "2"}, True)],
)
def test_ranks_that_mpi_started_are_not_taken_for_worlds_of_one(monkeypatch, variables, by_mpi):
    """Scripts may leave the process group to ``deepspeed.initialize``, which asks MPI for its ranks."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    options = {}
    monkeypatch.setattr(deepspeed, "init_distributed", lambda **given: options.update(given))
    init_distributed()
    assert options["auto_mpi_discovery"] is by_mpi
    assert ("RANK" in os.environ) is not by_mpi
