"""Prints the parameters that transformers' classes have in the shapes of the presets.

    python -m tests.parity.preset_counts

needs torch and transformers; nothing is allocated (torch's meta device). tests/test_presets.py holds
these numbers.
"""

import torch
import transformers

from bluelm_jax import presets

LLAMA = ("smollm2_135m", "tinyllama_1_1b", "vicuna_7b", "bluelm_3b")
QWEN2 = ("qwen2_0_5b", "qwen2_1_5b")


def count(module):
    return sum(p.numel() for p in module.parameters())


def decoder(name, kind):
    """A causal LM of transformers in a preset's shape; tied heads count once."""
    ours = getattr(presets, name)()
    cfg = transformers.AutoConfig.for_model(
        kind, vocab_size=ours.vocab_size, hidden_size=ours.width, num_hidden_layers=ours.depth,
        intermediate_size=ours.mlp_dim, num_attention_heads=ours.num_heads,
        num_key_value_heads=ours.num_kv_heads, head_dim=ours.head_dim,
        tie_word_embeddings=ours.tied_head,
    )  # fmt: skip
    return transformers.AutoModelForCausalLM.from_config(cfg)


def main():
    """One line a preset."""
    with torch.device("meta"):
        for name in LLAMA:
            print(f"{name:<20}{count(decoder(name, 'llama')):>16,}  LlamaForCausalLM")
        for name in QWEN2:
            print(f"{name:<20}{count(decoder(name, 'qwen2')):>16,}  Qwen2ForCausalLM")
        # MiniCPM has no class of its own; Granite has the same weights.
        minicpm = count(decoder("minicpm_2b", "granite"))
        print(f"{'minicpm_2b':<20}{minicpm:>16,}  GraniteForCausalLM")
        ours = presets.siglip_so400m()
        cfg = transformers.SiglipVisionConfig(
            hidden_size=ours.width, num_hidden_layers=ours.depth, intermediate_size=ours.mlp_dim,
            num_attention_heads=ours.num_heads, image_size=ours.tile_size,
            patch_size=ours.patch_size,
        )  # fmt: skip
        tower = transformers.SiglipVisionModel(cfg)
        head = sum(p.numel() for name, p in tower.named_parameters() if ".head." in f".{name}")
        print(f"{'siglip_so400m':<20}{count(tower) - head:>16,}  SiglipVisionModel without head")
        print(f"{'':<20}{count(tower):>16,}  with its pooling head")


if __name__ == "__main__":
    main()
