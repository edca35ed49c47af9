#!/usr/bin/env python3
"""Holds exported models, loaded by the public library, against what `palimpsest score` says of the same tokens.

usage: compare_export.py PALIMPSEST GOLDEN_MODELS

Every folder of GOLDEN_MODELS is imported, trained for three steps and exported. Then the library, in f32, and `score`
give the log-probability of every token; the norm of the difference over the norm of the library's is at most 2e-5.
Weights that came in bf16 go out rounded: of those `score` reads what was exported. Models that were born here, one of
each family, are trained from nothing and held against the library likewise.
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
    source, imported = f"{golden}/{name}", f"{work}/imported"
    with open(f"{source}/config.json", encoding="utf-8") as file:
        public_config = json.load(file)
    run(palimpsest, "import", "hf", source, imported)
    rounded = public_config.get("dtype", public_config.get("torch_dtype")) != "float32"
    return error_of(palimpsest, work, public_config["vocab_size"], f"{imported}/config.yaml", [], imported, rounded)


SIZES = """
model: {vocab_size: 131, hidden_size: 48, num_layers: 3, mlp: {intermediate_size: 80}}
"""
MLA = ("model.mla.num_heads=2 model.mla.kv_lora_rank=20 model.mla.qk_nope_head_dim=12 model.mla.qk_rope_head_dim=6 "
       "model.mla.v_head_dim=10 ")
MOE = ("model.moe.num_experts=6 model.moe.experts_per_token=2 model.moe.intermediate_size=20 model.moe.dense_layers=[0] "
       "model.moe.shared_intermediate_size=40 ")
BORN = {
    "kimi_linear": MLA + MOE + "model.layers=[kda,mla] model.kda.num_heads=3 model.kda.head_dim=16 model.mla.rope=none "
                   "model.tie_embeddings=true model.moe.num_groups=3 model.moe.top_groups=2",
    "deepseek_v3": MLA + MOE + "model.layers=[mla] model.mla.rope=interleaved model.mla.rope_scaling.kind=yarn "
                   "model.mla.rope_scaling.factor=8 model.mla.rope_scaling.original_max_positions=64 "
                   "model.mla.rope_scaling.mscale=1 model.mla.rope_scaling.mscale_all_dim=0.5",
    "qwen3_next": MOE + "model.layers=[gdn,attention] model.norm=one_centred model.gdn.num_heads=2 "
                  "model.gdn.num_value_heads=4 model.gdn.head_dim=8 model.gdn.value_head_dim=16 "
                  "model.attention.num_heads=4 model.attention.num_kv_heads=2 model.attention.head_dim=16 "
                  "model.attention.rope_dim=4 model.attention.output_gate=true model.attention.qk_norm=true "
                  "model.moe.router=softmax model.moe.shared_gate=true",
    "llama": "model.layers=[attention] model.attention.num_heads=4 model.attention.num_kv_heads=2 "
             "model.attention.head_dim=12 model.attention.rope_scaling.kind=llama3 model.attention.rope_scaling.factor=4 "
             "model.attention.rope_scaling.original_max_positions=64 model.tie_embeddings=true",
}


def compare_born(palimpsest, name, work):
    config = f"{work}/born.yaml"
    with open(config, "w", encoding="utf-8") as file:
        file.write(SIZES)
    return error_of(palimpsest, work, 131, config, BORN[name].split(), None, False)


def error_of(palimpsest, work, vocab_size, config, overrides, start, rounded):
    generator = np.random.default_rng(vocab_size)
    documents = [np.concatenate([[1], generator.integers(3, vocab_size, length), [2]]) for length in LENGTHS]
    write_shard(f"{work}/held_out", documents, vocab_size)
    training = [np.concatenate([[1], generator.integers(3, vocab_size, 200), [2]]) for _ in range(8)]
    write_shard(f"{work}/train", training, vocab_size)
    trained, exported, scores = f"{work}/run", f"{work}/exported", f"{work}/scores.h5"
    common = ["precision=f32", "data.tokenizer=none.model", f"data.sequence_length={ROW}", "device=cpu",
              "hardware.peak_tflops=1", *overrides]
    run(palimpsest, "train", config, f"run.dir={trained}", f"data.train={work}/train", "train.steps=3",
        "train.sequences_per_step=4", "train.micro_batch=4", "optimizer.lr=1e-3", *common,
        *([f"from={start}"] if start else []))
    run(palimpsest, "export", "hf", trained, exported)
    run(palimpsest, "score", config, f"from={exported if rounded else trained}", "--tokens", f"{work}/held_out",
        "--out", scores, *common)

    with h5py.File(scores) as file:
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
        sys.exit(f"{exported}: score gives {got.shape} log-probabilities at other tokens than {expected.shape}")
    scored = ~np.isnan(expected)
    return np.linalg.norm(got[scored] - expected[scored]) / np.linalg.norm(expected[scored])


def main():
    palimpsest, golden = os.path.abspath(sys.argv[1]), os.path.abspath(sys.argv[2])
    cases = [(name, lambda work, name=name: compare(palimpsest, golden, name, work)) for name in sorted(os.listdir(golden))]
    cases += [(f"born here: {name}", lambda work, name=name: compare_born(palimpsest, name, work)) for name in BORN]
    failed = 0
    for name, error_in in cases:
        with tempfile.TemporaryDirectory() as work:
            error = error_in(work)
        failed += not error <= LIMIT
        print(f"{name:24} {error:.2e} (limit {LIMIT:.0e}){'' if error <= LIMIT else ' FAILED'}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
