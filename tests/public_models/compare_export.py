#!/usr/bin/env python3
"""Holds exported models, loaded by the public library, against what `palimpsest score` says of the same tokens.

usage: compare_export.py PALIMPSEST GOLDEN_MODELS

Every folder of GOLDEN_MODELS is imported, trained for three steps and exported. Then the library, in f32, and `score`
give the log-probability of every token; the norm of the difference over the norm of the library's is at most 2e-5.
Weights that came in bf16 go out rounded: of those `score` reads what was exported.
Exits with 77 and a message where the library is missing.
"""
import json
import os
import subprocess
import sys
import tempfile
import zlib

try:
    import h5py
    import numpy as np
    import torch
    from transformers import AutoModelForCausalLM
except ImportError as error:
    print(f"SKIPPED: {error}; this needs torch, transformers 5.17 or newer, h5py and numpy")
    sys.exit(77)

LIMIT = 2e-5
LENGTHS = (29, 1, 22)  # tokens of each document beside bos and eos; all in one row
ROW = 64


def run(*arguments):
    environment = dict(os.environ, OMP_WAIT_POLICY="passive")
    result = subprocess.run(arguments, capture_output=True, text=True, env=environment, check=False)
    if result.returncode != 0:
        sys.exit(f"{' '.join(arguments)} failed:\n{result.stdout}{result.stderr}")


def write_shard(folder, documents, vocab_size):
    os.makedirs(folder)
    tokens = np.concatenate(documents).astype("<u2")
    offsets = np.cumsum([0] + [len(document) for document in documents]).astype("<i8")
    with h5py.File(f"{folder}/tokens-00000.h5", "w", libver="v110") as file:
        file.create_dataset("tokens", data=tokens, chunks=tokens.shape, fletcher32=True)
        file.create_dataset("doc_offsets", data=offsets, chunks=offsets.shape, fletcher32=True)
        file.attrs.update({"format": np.bytes_("palimpsest tokens"), "format_version": 1, "num_tokens": len(tokens),
                           "num_documents": len(documents), "vocab_size": vocab_size, "tokenizer": np.bytes_("none"),
                           "tokenizer_hash": np.bytes_("0" * 16), "bos": 1, "eos": 2, "text_bytes": len(tokens),
                           "tokens_crc32": zlib.crc32(tokens.tobytes())})


def compare(palimpsest, golden, name, work):
    source, imported = f"{golden}/{name}", f"{work}/{name}.checkpoint"
    with open(f"{source}/config.json", encoding="utf-8") as file:
        public_config = json.load(file)
    vocab_size = public_config["vocab_size"]
    generator = np.random.default_rng(len(name))
    documents = [np.concatenate([[1], generator.integers(3, vocab_size, length), [2]]) for length in LENGTHS]
    write_shard(f"{work}/{name}.held_out", documents, vocab_size)
    training = [np.concatenate([[1], generator.integers(3, vocab_size, 200), [2]]) for _ in range(8)]
    write_shard(f"{work}/{name}.train", training, vocab_size)
    run(palimpsest, "import", "hf", source, imported)
    config, trained, exported = f"{imported}/config.yaml", f"{work}/{name}.run", f"{work}/{name}.exported"
    common = ["data.tokenizer=none.model", f"data.sequence_length={ROW}", "device=cpu", "hardware.peak_tflops=1"]
    run(palimpsest, "train", config, f"from={imported}", f"run.dir={trained}", f"data.train={work}/{name}.train",
        "train.steps=3", "train.sequences_per_step=4", "train.micro_batch=4", "optimizer.lr=1e-3", *common)
    run(palimpsest, "export", "hf", trained, exported)
    scored = trained if public_config.get("dtype", public_config.get("torch_dtype")) == "float32" else exported
    run(palimpsest, "score", config, f"from={scored}", "--tokens", f"{work}/{name}.held_out", "--out",
        f"{work}/{name}.h5", *common)

    with h5py.File(f"{work}/{name}.h5") as file:
        got = file["logprob"][:].astype(np.float64)
    model = AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32, attn_implementation="eager").eval()
    expected = []
    with torch.no_grad():
        for document in documents:
            ids = torch.tensor(document)[None]
            logprob = torch.log_softmax(model(input_ids=ids).logits.double(), dim=-1)
            expected += [np.nan] + logprob[0, :-1].gather(1, ids[0, 1:, None])[:, 0].tolist()
    expected = np.array(expected)
    if got.shape != expected.shape or not np.array_equal(np.isnan(got), np.isnan(expected)):
        sys.exit(f"{name}: score gives {got.shape} log-probabilities at other tokens than {expected.shape}")
    scored = ~np.isnan(expected)
    return np.linalg.norm(got[scored] - expected[scored]) / np.linalg.norm(expected[scored])


def main():
    palimpsest, golden = os.path.abspath(sys.argv[1]), os.path.abspath(sys.argv[2])
    failed = 0
    for name in sorted(os.listdir(golden)):
        with tempfile.TemporaryDirectory() as work:
            error = compare(palimpsest, golden, name, work)
        failed += not error <= LIMIT
        print(f"{name:20} {error:.2e} (limit {LIMIT:.0e}){'' if error <= LIMIT else ' FAILED'}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
