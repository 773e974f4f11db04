"""Configuration: every mistake is one error with path, value and what is allowed; every key is in the schema."""

import json
import pickle

import pytest

from xmoe.config import (
    CONSTRUCTOR_ONLY,
    SECTIONS,
    ConfigError,
    json_schema,
    parse_section,
    read_json,
    read_train_config,
    read_xmoe_section,
)

# section, content, path, value as shown, what the message must say
WRONG = [
    ("xmoe", {"dispatc": "flat"}, "xmoe.dispatc", "'flat'", "dispatch"),
    ("xmoe", {"interval": 3}, "xmoe.interval", "3", "unknown key"),
    ("xmoe", {"integer": 3}, "xmoe.integer", "3", "unknown key"),
    (
        "xmoe",
        {"dispatch": "hierarchical"},
        "xmoe.dispatch",
        "'hierarchical'",
        "'auto', 'local', 'flat', 'gpu', 'node' or 'node+gpu'",
    ),
    ("xmoe", {"dispatch": None}, "xmoe.dispatch", "None", "'auto', 'local', 'flat', 'gpu', 'node' or 'node+gpu'"),
    ("xmoe", {"ranks_per_node": 0}, "xmoe.ranks_per_node", "0", "greater than or equal to 1"),
    ("xmoe", {"ranks_per_node": 4.0}, "xmoe.ranks_per_node", "4.0", "integer"),
    ("xmoe", {"overlap_chunks": 0}, "xmoe.overlap_chunks", "0", "greater than or equal to 1"),
    ("xmoe", {"overlap_chunks": 65}, "xmoe.overlap_chunks", "65", "less than or equal to 64"),
    ("xmoe", {"overlap_chunks": True}, "xmoe.overlap_chunks", "True", "integer"),
    ("xmoe", {"stage_times": 1}, "xmoe.stage_times", "1", "boolean"),
    ("xmoe", {"strict_compat": 1}, "xmoe.strict_compat", "1", "boolean"),
    ("xmoe", {"strict_compat": "true"}, "xmoe.strict_compat", "'true'", "boolean"),
    ("xmoe", {"normalize_weights": "yes"}, "xmoe.normalize_weights", "'yes'", "boolean"),
    ("xmoe", {"routed_scaling_factor": 0}, "xmoe.routed_scaling_factor", "0", "greater than 0"),
    ("xmoe", {"routed_scaling_factor": float("nan")}, "xmoe.routed_scaling_factor", "nan", "finite"),
    ("xmoe", {"aux_loss_coefficient": -1.0}, "xmoe.aux_loss_coefficient", "-1.0", "greater than or equal to 0"),
    ("xmoe", {"input_jitter": 1.0}, "xmoe.input_jitter", "1.0", "less than 1"),
    ("xmoe", {"collective_timeout_s": "10m"}, "xmoe.collective_timeout_s", "'10m'", "number"),
    ("xmoe", {"drop_policy": "first"}, "xmoe.drop_policy", "'first'", "'probs', 'position' or 'random'"),
    ("xmoe", {"self_row_guard": True}, "xmoe.self_row_guard", "True", "'auto', 'on' or 'off'"),
    ("xmoe", [], "xmoe", "[]", "JSON object"),
    ("xmoe", "auto", "xmoe", "'auto'", "JSON object"),
    ("model", {"hidden_size": 130}, "model.hidden_size", "130", "num_heads (4)"),
    ("model", {"hidden_size": 12.5}, "model.hidden_size", "12.5", "integer"),
    ("model", {"hidden_size": 20}, "model.num_heads", "4", "even"),
    ("model", {"num_kv_heads": 3}, "model.num_heads", "4", "num_kv_heads (3)"),
    ("model", {"num_dense_layers": 9}, "model.num_dense_layers", "9", "num_layers (4)"),
    ("model", {"top_k": 33}, "model.top_k", "33", "num_experts (32)"),
    ("model", {"ep_size": 3}, "model.num_experts", "32", "ep_size (3)"),
    ("model", {"capacity_factor": 0.0}, "model.capacity_factor", "0.0", "greater than 0"),
    ("data", {"paths": []}, "data.paths", "[]", "at least 1"),
    ("data", {"paths": [1]}, "data.paths.0", "1", "string"),
    ("data", {"paths": "corpus"}, "data.paths", "'corpus'", "list"),
    ("data", {"held_out_fraction": 1.0}, "data.held_out_fraction", "1.0", "less than 1"),
    ("run", {"name": "../x"}, "run.name", "'../x'", "pattern"),
    ("run", {"steps": 0}, "run.steps", "0", "greater than 0"),
    ("run", {"steps": True}, "run.steps", "True", "integer"),
]


@pytest.mark.parametrize(("section", "content", "path", "value", "said"), WRONG)
def test_a_mistake_names_path_value_and_what_is_allowed(section, content, path, value, said):
    with pytest.raises(ConfigError) as caught:
        read_train_config({section: content})
    assert caught.value.path == path
    assert str(caught.value).startswith(f"{path} is {value}: ")
    assert said in str(caught.value)
    again = pickle.loads(pickle.dumps(caught.value))
    assert (type(again), str(again)) == (ConfigError, str(caught.value))


@pytest.mark.parametrize("key", CONSTRUCTOR_ONLY)
def test_settings_that_create_parameters_are_refused_by_name(key):
    with pytest.raises(ConfigError, match=rf"xmoe\.{key} is .*constructor-only.*xmoe\.MoE"):
        read_xmoe_section({"xmoe": {key: 1}})


def test_the_schema_lists_every_key_with_a_description():
    schema = json.loads(json.dumps(json_schema()))
    assert set(schema["properties"]) == set(SECTIONS) == {"xmoe", "model", "data", "run"}
    for name, cls in SECTIONS.items():
        section = schema["properties"][name]
        assert set(section["properties"]) == set(cls.model_fields)
        assert section["additionalProperties"] is False
        assert all(entry.get("description") for entry in section["properties"].values()), name
        assert all("default" in entry for entry in section["properties"].values()), name
    assert set(schema["properties"]["xmoe"]["x-constructor-only"]) == set(CONSTRUCTOR_ONLY)
    assert not set(CONSTRUCTOR_ONLY) & set(schema["properties"]["xmoe"]["properties"])


def test_defaults_are_valid_and_numbers_may_be_whole():
    for name, cls in SECTIONS.items():
        assert parse_section(name, cls, None) == parse_section(name, cls, cls().model_dump())
    assert read_xmoe_section({"xmoe": {"routed_scaling_factor": 2}}).routed_scaling_factor == 2.0
    assert read_xmoe_section({"train_batch_size": 4}).dispatch == "auto"


def test_a_run_file_keeps_deepspeeds_own_keys():
    config = read_train_config({"train_batch_size": 4, "zero_optimization": {"stage": 1}, "run": {"steps": 5}})
    assert config.deepspeed == {"train_batch_size": 4, "zero_optimization": {"stage": 1}}
    assert config.run.steps == 5


@pytest.mark.parametrize(
    ("content", "said"),
    [(None, "No such file"), (b"{", "not valid JSON"), (b"[1]", "JSON object"), (b"\xff\xfe{}", "not valid JSON")],
)
def test_unreadable_files_are_named(tmp_path, content, said):
    path = tmp_path / "run.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=said) as caught:
        read_json(path)
    assert str(path) in str(caught.value)
