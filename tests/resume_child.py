"""A training run that test_resume.py kills: mixture, shuffle, packing, worker processes.

    python tests/resume_child.py WORKDIR SOURCE SOURCE WORKERS LOG

Prints each step with the ids of its worker processes, and at the end a digest of the final state. A
digest of each batch goes to LOG. Worker processes import this file, so it imports nothing itself.
"""

import sys

STEPS = 8


def make_run(sources, workers):
    import dataclasses

    import model_helpers

    from bluelm_jax import data_config, schemes

    tiny = model_helpers.TINY
    vision, decoder = (dataclasses.replace(part, depth=1) for part in (tiny.vision, tiny.decoder))
    model = dataclasses.replace(tiny, vision=vision, decoder=decoder)

    data = {"seq_len": 200, "batch_size": 2, "tiles_per_group": 12, "num_workers": workers}
    data |= {"packing": data_config.Packing(lookahead=6), "prefetch": 3, "tile_groups": 2}
    run = model_helpers.make_run(
        "unused", model=model, data=data, steps=STEPS, save_every=2, log_every=1
    )
    tiling = schemes.Tiling(scheme=schemes.Relaxed(), tile_size=run.model.vision.tile_size)
    mixed = tuple(
        data_config.SourceConfig(path=path, weight=weight)
        for path, weight in zip(sources, (3.0, 1.0), strict=True)
    )
    small = {"sources": mixed, "tiling": tiling, "on_unreadable_image": "skip"}
    return model_helpers.replace(run, "data", **small)


def digest(arrays):
    import hashlib

    import numpy as np

    found = hashlib.sha256()
    for name, x in sorted(arrays.items()):
        found.update(f"{name} {x.dtype} {x.shape}".encode() + np.ascontiguousarray(x).tobytes())
    return found.hexdigest()


def main(workdir, first, second, workers, log):
    import multiprocessing

    import jax
    import numpy as np

    from bluelm_jax import train

    put = train.device_batch

    def logged(arrays, mesh):
        with open(log, "a") as file:
            file.write(digest(arrays) + "\n")
        return put(arrays, mesh)

    def progress(step, _):
        ids = [child.pid for child in multiprocessing.active_children()]
        print("step", step, *ids, flush=True)

    train.device_batch = logged
    finished = train.train(make_run((first, second), int(workers)), workdir, progress)
    leaves = jax.tree_util.tree_leaves_with_path(finished.state)
    state = {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in leaves}
    print("final", finished.steps_now, digest(state), finished.data.splitlines()[0], flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
