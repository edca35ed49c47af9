#!/usr/bin/env python3
"""Writes reference models with the public implementations, in the form that tests/golden_models_test.cpp reads.

usage: make_golden.py OUT [NAME ...]      (needs torch, transformers >= 5.17 and safetensors)

Each folder gets config.json and model.safetensors as the library saves them (kimi_linear_published: as that model is
published), and reference.{json,safetensors}: tokens, logits, the loss of every token, every gradient of the mean loss,
and an AdamW trajectory, all in fp32 on the CPU.
"""
import copy
import json
import os
import sys

import torch
from safetensors.torch import save_file
from transformers import (DeepseekV3Config, DeepseekV3ForCausalLM, KimiLinearConfig, KimiLinearForCausalLM, LlamaConfig,
                          LlamaForCausalLM, Qwen3NextConfig, Qwen3NextForCausalLM)

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


def kimi():
    return KimiLinearForCausalLM(KimiLinearConfig(
        **dict(COMMON, hidden_size=40, intermediate_size=56), num_hidden_layers=3, num_attention_heads=3,
        num_key_value_heads=3, q_lora_rank=18, kv_lora_rank=20, qk_nope_head_dim=12, qk_rope_head_dim=6, v_head_dim=10,
        linear_num_heads=1, linear_head_dim=24, linear_conv_kernel_dim=3,
        layer_types=["linear_attention", "full_attention", "linear_attention"], pad_token_id=None,
        mlp_layer_types=["dense", "sparse", "sparse"], num_local_experts=6, n_shared_experts=2, num_experts_per_tok=3,
        n_group=3, topk_group=2, norm_topk_prob=False, routed_scaling_factor=0.7, moe_intermediate_size=12,
        rms_norm_eps=1e-5, max_position_embeddings=512))


# Tied, without query rank and shared expert (the library saves one of size 0), pairs half-split.
def deepseek_small():
    return DeepseekV3ForCausalLM(DeepseekV3Config(
        **dict(COMMON, hidden_size=32, vocab_size=97), num_hidden_layers=2, num_attention_heads=1,
        num_key_value_heads=1, q_lora_rank=None, kv_lora_rank=12, qk_nope_head_dim=10, qk_rope_head_dim=6,
        v_head_dim=14, n_routed_experts=5, n_shared_experts=0, num_experts_per_tok=2, n_group=1, topk_group=1,
        norm_topk_prob=False, moe_intermediate_size=12, first_k_dense_replace=1, max_position_embeddings=512,
        tie_word_embeddings=True, rope_interleave=False,
        rope_parameters={"rope_type": "default", "rope_theta": 500.0}))


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


MODELS = {"deepseek_v3_moe": deepseek, "deepseek_v3_tied": deepseek_small, "kimi_linear_published": kimi,
          "qwen3_next_moe": qwen, "llama_llama3": llama}
STEPS, ROWS, LENGTH = 4, 2, 61
LR, BETAS, EPS, DECAY, CLIP = 1e-3, (0.9, 0.95), 1e-8, 0.1, 1.0


def is_decayed(name):
    return not ("norm" in name or name.endswith((".bias", "A_log", "dt_bias")))


def losses(model, tokens):
    logits = model(input_ids=tokens[:, :-1].long()).logits
    return logits, torch.nn.functional.cross_entropy(logits.transpose(1, 2), tokens[:, 1:].long(), reduction="none")


def save_published(model, folder):
    """Weights as bf16 in shards, the decay's parameters as f32, and the first spelling of Kimi Linear's configuration."""
    with torch.no_grad():
        wide = {key: value for key, value in model.named_parameters() if key.endswith(("A_log", "dt_bias"))}
        for key, value in model.named_parameters():
            if key not in wide:
                value.copy_(value.bfloat16())
        narrow = copy.deepcopy(model).bfloat16()
        for key, value in wide.items():
            narrow.get_parameter(key).data = value
    narrow.save_pretrained(folder, max_shard_size="80KB")
    os.remove(f"{folder}/generation_config.json")
    with open(f"{folder}/config.json", encoding="utf-8") as file:
        config = json.load(file)
    layers, feed_forward = config.pop("layer_types"), config.pop("mlp_layer_types")
    places = {kind: [i + 1 for i, layer in enumerate(layers) if layer == kind] for kind in layers}
    config.update(first_k_dense_replace=feed_forward.count("dense"), moe_layer_freq=1, mla_use_nope=True,
                  moe_router_activation_func="sigmoid", use_grouped_topk=True, rope_scaling=None, rope_theta=10000.0,
                  linear_attn_config={"head_dim": config.pop("linear_head_dim"),
                                      "num_heads": config.pop("linear_num_heads"),
                                      "short_conv_kernel_size": config.pop("linear_conv_kernel_dim"),
                                      "kda_layers": places["linear_attention"],
                                      "full_attn_layers": places["full_attention"]})
    with open(f"{folder}/config.json", "w", encoding="utf-8") as file:
        json.dump(config, file, indent=2)


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
    if name == "kimi_linear_published":
        save_published(model, f"{out}/{name}")
    else:
        model.save_pretrained(f"{out}/{name}")
    tokens = torch.randint(3, model.config.vocab_size, (STEPS, ROWS, LENGTH + 1), dtype=torch.int32)

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
