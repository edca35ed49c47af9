#!/usr/bin/env python3
"""Writes reference models with the public implementations, in the form that tests/golden_models_test.cpp reads.

usage: make_golden.py OUT [NAME ...]      (needs torch, transformers >= 5.17 and safetensors)

Each folder gets config.json and model.safetensors as the library saves them, and reference.{json,safetensors}: tokens,
logits, the loss of every token, every gradient of the mean loss, and an AdamW trajectory, all in fp32 on the CPU.
"""
import json
import os
import sys

import torch
from safetensors.torch import save_file
from transformers import (DeepseekV3Config, DeepseekV3ForCausalLM, LlamaConfig, LlamaForCausalLM, Qwen3NextConfig,
                          Qwen3NextForCausalLM)

COMMON = dict(vocab_size=131, hidden_size=48, intermediate_size=80, initializer_range=0.08, bos_token_id=1,
              eos_token_id=2, use_cache=False, attn_implementation="eager")


def deepseek():
    return DeepseekV3ForCausalLM(DeepseekV3Config(
        **COMMON, num_hidden_layers=3, num_attention_heads=3, num_key_value_heads=3, q_lora_rank=20, kv_lora_rank=24,
        qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=12, n_routed_experts=8, n_shared_experts=2,
        num_experts_per_tok=3, n_group=4, topk_group=2, norm_topk_prob=True, routed_scaling_factor=1.7,
        moe_intermediate_size=20, first_k_dense_replace=1, rms_norm_eps=1e-6, max_position_embeddings=512,
        rope_parameters={"rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "beta_fast": 32, "beta_slow": 1,
                         "mscale": 0.7, "mscale_all_dim": 1.3, "original_max_position_embeddings": 64}))


def qwen():
    return Qwen3NextForCausalLM(Qwen3NextConfig(
        **COMMON, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
        linear_num_key_heads=2, linear_num_value_heads=6, linear_key_head_dim=8, linear_value_head_dim=16,
        linear_conv_kernel_dim=4, num_experts=6, num_experts_per_tok=2, norm_topk_prob=True, decoder_sparse_step=1,
        mlp_only_layers=[1], moe_intermediate_size=20, shared_expert_intermediate_size=28, max_position_embeddings=512,
        layer_types=["linear_attention", "full_attention", "linear_attention", "full_attention"],
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}))


def llama():
    return LlamaForCausalLM(LlamaConfig(
        **COMMON, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=1, head_dim=12,
        max_position_embeddings=512, tie_word_embeddings=True,
        rope_parameters={"rope_type": "llama3", "rope_theta": 10000.0, "factor": 4.0, "low_freq_factor": 1.0,
                         "high_freq_factor": 4.0, "original_max_position_embeddings": 64}))


MODELS = {"deepseek_v3_moe": deepseek, "qwen3_next_moe": qwen, "llama_llama3": llama}
STEPS, ROWS, LENGTH = 4, 2, 61
LR, BETAS, EPS, DECAY, CLIP = 1e-3, (0.9, 0.95), 1e-8, 0.1, 1.0


def is_decayed(name):
    return not ("norm" in name or name.endswith((".bias", "A_log", "dt_bias")))


def losses(model, tokens):
    logits = model(input_ids=tokens[:, :-1].long()).logits
    return logits, torch.nn.functional.cross_entropy(logits.transpose(1, 2), tokens[:, 1:].long(), reduction="none")


def make(name, out):
    torch.manual_seed(len(name))
    model = MODELS[name]().float().eval()
    with torch.no_grad():
        for key, value in model.named_parameters():
            if "norm" in key or key.endswith("dt_bias"):
                value.add_(0.1 * torch.randn_like(value))
        for key, value in model.named_buffers():
            if key.endswith("e_score_correction_bias"):
                value.copy_(0.05 * torch.randn_like(value))
    os.makedirs(f"{out}/{name}", exist_ok=True)
    model.save_pretrained(f"{out}/{name}")
    tokens = torch.randint(3, COMMON["vocab_size"], (STEPS, ROWS, LENGTH + 1), dtype=torch.int32)

    logits, token_loss = losses(model, tokens[0])
    token_loss.mean().backward()
    values = {"tokens": tokens, "logits": logits.detach(), "token_loss": token_loss.detach()}
    for key, value in model.named_parameters():
        values["grad." + key] = torch.zeros_like(value) if value.grad is None else value.grad.clone()

    groups = [{"params": [p for n, p in model.named_parameters() if is_decayed(n)], "weight_decay": DECAY},
              {"params": [p for n, p in model.named_parameters() if not is_decayed(n)], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=BETAS, eps=EPS)
    trajectory_loss, trajectory_norm = [], []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = losses(model, tokens[step])[1].mean()
        loss.backward()
        trajectory_norm.append(torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP).item())
        trajectory_loss.append(loss.item())
        optimizer.step()
    values["trajectory_loss"] = torch.tensor(trajectory_loss)
    values["trajectory_grad_norm"] = torch.tensor(trajectory_norm)
    save_file({k: v.contiguous() for k, v in values.items()}, f"{out}/{name}/reference.safetensors")
    # From the first update on, entries whose gradient is rounding noise move by lr either way.
    later = [1e-5] + [1e-3] * (STEPS - 1)
    reference = {"optimizer": "AdamW", "lr": LR, "betas": BETAS, "eps": EPS, "weight_decay": DECAY, "clip": CLIP,
                 "steps": STEPS,
                 "tolerance": {"logits": 2e-5, "token_loss": 2e-5, "gradient": 1e-4,
                               "gradient_where_name_contains": {"A_log": 1e-3, "dt_bias": 1e-3, "in_proj_ba": 1e-3},
                               "trajectory_loss_absolute": later,
                               "trajectory_grad_norm_relative": [1e-4] + [3e-3] * (STEPS - 1)}}
    with open(f"{out}/{name}/reference.json", "w") as file:
        json.dump(reference, file, indent=1)
    print(name, trajectory_loss, trajectory_norm)


if __name__ == "__main__":
    for chosen in sys.argv[2:] or MODELS:
        make(chosen, sys.argv[1])
