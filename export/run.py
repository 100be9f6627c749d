r"""Answers a question about images with an exported model, on LiteRT.

    python -m export.run --bundle=runs/quickstart/export --image=page.png \
        --prompt="Read the text." --gin_bindings="RunnerConfig.num_threads = 2"

Repeat --image for several images; '<image>' in the prompt marks their places, else they come first.
Prints the answer and the milliseconds of each stage. `--dry_run` prints the prompt's size only.
"""

from __future__ import annotations

from absl import flags

from export import bundle, prompt
from export import gin_setup as gin_setup
from export.config import RunnerConfig
from gin_configs import command

BUNDLE = flags.DEFINE_string(
    "bundle", None, "Directory written by export.to_tflite.", required=True
)
IMAGE = flags.DEFINE_multi_string("image", [], "Image file; may be repeated.")
PROMPT = flags.DEFINE_string("prompt", "", "The question.")
VERIFY = flags.DEFINE_bool("verify", True, "Compare checksums before loading.")
flags.DEFINE_alias("workdir", "bundle")
flags.adopt_module_key_flags(command)


def main() -> None:
    """Builds the prompt, runs the model, prints the answer and the times."""
    config = command.build(RunnerConfig)
    manifest = bundle.load(BUNDLE.value, verify=VERIFY.value)
    prompter = prompt.Prompter(BUNDLE.value, manifest)
    example = prompter.make(PROMPT.value, IMAGE.value)
    print(f"prompt: {example.length} positions, {example.num_views} tiles")
    if command.DRY_RUN.value:
        return
    from export.runner import Runner  # after every check that needs no interpreter

    runner = Runner(BUNDLE.value, config, verify=False)
    answer = runner.generate(example.tiles, example.tokens, example.image_index)
    print(f"answer: {prompter.tokenizer.decode(answer.tokens)}")
    if not answer.stopped:
        print(f"(cut after RunnerConfig.max_new_tokens = {config.max_new_tokens})")
    for stage, ms in runner.times.median().items():
        print(f"  {stage:<12}{ms:>10.2f} ms a call, {len(runner.times.calls[stage])} calls")


if __name__ == "__main__":
    command.run(main)
