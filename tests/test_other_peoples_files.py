"""Files that other programs write are read, or rejected in one sentence with the way out."""

import json

import pytest

from extensions.real_models.saved_folder import find_tensors
from extensions.real_models.saved_settings import read_settings
from files.inputs import InputError
from pipeline.schedules import build_schedule
from pipeline.schedules.text_form import from_csv, to_csv
from planning.partition import PartitionError, read_profile

GPIPE = "0F0,0F1,0B0,0B1\n1F0,1F1,1B0,1B1\n"
WITH_MESSAGES = (  # as torch's format_pipeline_order writes a schedule with its communication
    "0UNSHARD,0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1,0REDUCE_GRAD,0RESHARD\n"
    "1UNSHARD,1RECV_F0,1F0,1RECV_F1,1F1,1B0,1SEND_B0,1B1,1SEND_B1,1REDUCE_GRAD,1RESHARD\n"
)


def test_a_schedule_with_messages_is_read_without_them():
    assert to_csv(from_csv(WITH_MESSAGES)) == GPIPE


def test_in_a_schedule_of_2024_b_is_the_half_for_the_input():
    halves = from_csv("0F0,0F1,0B0,0W0,0BW1\n1F0,1B0,1F1,1W0,1BW1\n")
    assert to_csv(halves) == "0F0,0F1,0I0,0W0,0B1\n1F0,1I0,1F1,1W0,1B1\n"


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb-h1", "v-half"])
def test_the_course_s_own_schedules_are_read_as_they_are(name):
    schedule = build_schedule(name, 4, 8)
    assert from_csv(to_csv(schedule)).orders == schedule.orders


def test_a_graph_of_pipedream_is_rejected_with_the_fields_of_a_profile(tmp_path):
    path = tmp_path / "graph.txt"
    path.write_text(
        "node1 -- Input0 -- forward_compute_time=0.000, backward_compute_time=0.000, "
        "activation_size=0.0, parameter_size=0.000\n\tnode1 -- node4\n"
    )
    with pytest.raises(PartitionError) as error:
        read_profile(path)
    for field in ("forward_ms", "backward_ms", "activation_bytes", "parameter_bytes"):
        assert field in str(error.value)
    assert "graph.txt of PipeDream" in str(error.value) and "\n" not in str(error.value)


LLAMA = {
    "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "intermediate_size": 96, "vocab_size": 96,
}  # fmt: skip


@pytest.mark.parametrize(
    ("change", "cause", "remedy"),
    [
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_type is yarn",
         "the model before it was extended"),
        ({"quantization_config": {"bits": 4}}, "are quantised", "that they were made from"),
        ({"model_type": "qwen2", "use_sliding_window": True}, "use_sliding_window is set",
         "no longer than sliding_window"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "is not a language model",
         "saved as ...ForCausalLM"),
        ({"model_type": "qwen2", "architectures": ["Qwen2ForTokenClassification"]},
         "is not a language model", "saved as ...ForCausalLM"),
        ({"architectures": ["LlamaModel"]}, "is not a language model", "saved as ...ForCausalLM"),
        ({"hidden_act": "gelu"}, "hidden_act is gelu", "FeedForward in a copy"),
        ({"model_type": "qwen3", "use_sliding_window": True}, "use_sliding_window is set",
         "no longer than sliding_window"),
        ({"model_type": "mistral"}, "sliding_window is 4096", "set it to null in a copy"),
        ({"model_type": "mistral", "sliding_window": 8192}, "sliding_window is 8192",
         "set it to null in a copy"),
        ({"model_type": "mixtral"}, "model_type is mixtral", "folder of a Llama, a Mistral, a"),
        ({"model_type": "qwen3_moe"}, "model_type is qwen3_moe", "folder of a Llama, a Mistral, a"),
        ({"model_type": ["llama"]}, "model_type is ['llama']", "folder of a Llama, a Mistral, a"),
        ({"tie_word_embeddings": "true"}, '"true" in quotes', "true or false, without quotes"),
        ({"attention_dropout": "0.0"}, '"0.0" in quotes', "set it to 0.0"),
        ({"is_causal": False}, "is_causal is false", "folder of a Llama, a Mistral, a"),
        ({"layer_types": ["full_attention", "chunked_attention"]}, 'layer_types has ["chunked_',
         "folder of a Llama, a Mistral, a"),
        ({"layer_types": "sliding_attention"}, 'layer_types has "sliding_attention" in quotes',
         "folder of a Llama, a Mistral, a"),
        ({"transformers_weights": "other.safetensors"}, 'weights is "other.safetensors"',
         "take it out in a copy"),
        ({"attribute_map": {"rms_norm_eps": "pretraining_tp"}}, "attribute_map is {", "take it out"),
        ({"per_layer_config": {"1": {"hidden_act": "gelu"}}}, "per_layer_config is {", "take it out"),
        ({"pad_token_id": 1e3}, "pad_token_id is 1000.0", "take config.json"),
        ({"hidden_size": "64"}, 'hidden_size is "64" in quotes', "take config.json"),
        ({"num_attention_heads": 5}, "do not fit a width of 64", "take config.json"),
    ],
)  # fmt: skip
def test_each_folder_that_is_not_read_has_its_own_remedy(change, cause, remedy, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, **change}))
    with pytest.raises(InputError) as error:
        read_settings(tmp_path, 32)
    said = str(error.value)
    assert cause in said and remedy in said and said.index(cause) < said.index(remedy)


@pytest.mark.parametrize(
    ("file", "remedy"),
    [
        ("pytorch_model.bin", "write them with save_pretrained"),
        ("consolidated.00.pth", "write them with save_pretrained"),
        ("adapter_config.json", "merge it into its model"),
        ("README.md", "download the weights, too"),
    ],
)
def test_each_folder_without_safetensors_has_its_own_remedy(file, remedy, tmp_path):
    (tmp_path / file).write_text("")
    with pytest.raises(InputError, match=remedy):
        find_tensors(tmp_path)
