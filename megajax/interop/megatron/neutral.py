"""Arguments of all versions of Megatron-LM that leave alone what a model computes from its weights.

They say how a run was trained, fed, cut into shards, made faster, watched and saved. Some change the rounding (fp8,
fused kernels, attention_softmax_in_fp32, apply_query_key_layer_scaling, whose factor is taken back inside the softmax).
Others say more about a feature that has a switch of its own, which is no neutral argument (num_experts, use_mup,
multi_latent_attention, hybrid_layer_pattern, experimental_attention_variant, retro_add_retriever).
"""

from __future__ import annotations

import re

_GROUPS = {
    "length of the run, batches": r"""
        train_(iters|samples|sync_interval) global_batch_size micro_batch_size batch_size rampup_batch_size warmup
        step_batch_size_schedule decrease_batch_size_if_needed exit_\w+ skip_train iterations_to_skip iter_per_epoch
        consumed_\w+ skipped_train_samples phase_transition_iterations eval_\w+ full_validation test_mode
        start_eval_at_iter
        multiple_validation_sets validation_set_names calculate_per_token_loss do_(train|valid|test) iteration
        curr_iteration
        checkpoint_activations(_\w+)? manual_gc\w* empty_unused_memory_level eod_mask_loss reset_\w+ seq_length
        (encoder|decoder|retriever)_seq_length variable_seq_lengths finetune freeze_all_layers sample_rate
    """,
    "optimizer": r"""
        lr lr_\w+ min_lr weight_decay\w* (start|end)_weight_decay wd_incr_steps adam_\w+ sgd_momentum optimizer(_\w+)?
        clip_grad
        (adaptive_)?muon_\w+ soap_\w+ lion_\w+ decoupled_\w+ head_lr_mult apply_wd_to_qk_layernorm
        no_weight_decay_cond_type
        (dynamic_)?loss_scale(_window)? initial_loss_scale min_(loss_)?scale hysteresis exp_avg\w*
        main_(grads|params)_dtype
        use_precision_aware_optimizer store_param_remainders grad_norm_skip_threshold qk_clip\w* wsd_decay_steps
        (override|use_checkpoint)_(opt_param|lr)_scheduler use_torch_optimizer_for_cpu_offload
        dump_param_to_param_group_map
        overlap_cpu_optimizer_d2h_h2d pin_cpu_(grads|params) classes_fraction data_per_class_fraction fp32_allreduce
    """,
    "first weights, dropout's numbers": r"""
        seed init_method\w* embedding_init_method\w* output_layer_init_method use_cpu_initialization
        perform_initialization
        (te|inference)_rng_tracker use_te_rng_tracker data_parallel_random_init init_model_with_meta_device
        pretrained_checkpoint (bert|ict)_load moe_use_upcycling moe_upcycling_granularity
    """,
    "data and tokenizer": r"""
        data_(path|args_path|cache_path|impl|sharding) (train|valid|test|block|evidence|titles)_data_path split
        num_workers
        per_split_data_args_path per_dataset_sequences_path embedding_path mock_data mmap_\w+ dataloader_\w+
        mid_level_dataset_surplus
        renormalize_blend_weights num_dataset_builder_threads create_attention_mask_in_dataloader
        (s3|object_storage)_cache_path
        (enable|disable)_msc\w* fim_\w+ sft sft_\w+ mask_(prob|factor|type) short_seq_prob use_one_sent_docs
        query_in_block_prob
        tokenizer_\w+ legacy_tokenizer vocab_(size|file|extra_ids) merge_file make_vocab_size_divisible_by
        pad_vocab_size
        tiktoken_\w+ null_tokenizer_\w+ special_tokens chat_template metadata_path trust_remote_code use_gigatoken
        allow_ambiguous_pad_tokens logits_(save|load)_\w+
    """,
    "shards and communication": r"""
        rank world_size local_rank
        (data|tensor|pipeline|virtual_pipeline|transformer_pipeline|context|model|expert)_\w*parallel\w*
        encoder_(tensor|pipeline)_model_parallel_size sequence_parallel standalone_embedding_stage account_for_\w+
        gtp_\w+
        (first|last|decoder_first|decoder_last)_pipeline_num_layers
        num_layers_(per_virtual|in_first|in_last)_pipeline_stage
        num_virtual_stages_per_pipeline_rank microbatch_group_size_per_\w+ num_microbatches_with_partial_\w+
        expert_gtp_\w+
        hierarchical_context_parallel_sizes hybrid_context_parallel max_seqlen_per_dp_cp_rank cp_comm_type
        use_tp_pp_dp_mapping
        use_(distributed_optimizer|megatron_fsdp|custom_fsdp|torch_fsdp2|sharp|nccl_ub|ring_exchange_p2p|gloo_process_groups)
        use_layer_wise_\w+ enable_(gloo_process_groups|full_sharding_in_hsdp) torch_fsdp2_\w+ (megatron_)?fsdp_\w+
        nccl_\w+
        outer_dp_sharding_strategy num_distributed_optimizer_instances ddp_\w+ DDP_impl use_contiguous_buffers_in_\w+
        (align|delay|overlap)_(grad|param|p2p|moe_expert|dispatch|embedding)\w*
        delay_(wgrad_compute|offload_until_cuda_graph)
        grad_reduce_in_\w+ accumulate_allreduce_grads_in_fp32 gradient_\w+_fusion tp_comm_\w+ tp_only_amax_red
        sharp_enabled_group
        async_tensor_model_parallel_allreduce scatter_gather_tensors_in_pipeline defer_embedding_wgrad_compute
        wgrad_deferral_limit
        distributed_(backend|timeout\w*) lazy_mpu_init batch_p2p_\w+ deallocate_pipeline_outputs high_priority_\w+
        ep_overlap_\w+
        create_all_gather_group suggested_communication_unit_size symmetric_ar_type disable_symmetric_registration
        fake_process_group distribute_(saved|checkpointed)_activations clone_scatter_output_in_embedding
    """,
    "precision": r"""
        bf16 fp16 params_dtype autocast_dtype enable_autocast pipeline_dtype logit_dtype output_logit_dtype
        fp16_lm_cross_entropy
        fp32_residual_connection attention_softmax_in_fp32 apply_query_key_layer_scaling first_last_layers_bf16
        num_layers_at_(start|end)_in_bf16 fp[48] fp[48]_\w+ keep_fp8_transpose_cache\w*
        reuse_grad_buf_for_mxfp8_param_ag
        te_precision_config_file use_kitchen\w* kitchen_\w+ quant_recipe activation_func_fp8_input_store
        moe_router_dtype
        disable_bf16_reduced_precision_matmul disable_parameter_transpose_cache batch_invariant_\w+ deterministic_mode
        moe_router_padding_for_\w+
    """,
    "kernels": r"""
        transformer_impl attention_backend use_flash_attn flash_attention_version use_(mcore|legacy)_models onnx_safe
        deprecated_use_mcore_models masked_softmax_fusion scaled_\w*masked_softmax_fusion
        bias_(dropout|swiglu|activation)_fusion
        apply_rope_fusion fused_\w+ use_fused_weighted_squared_relu cross_entropy_\w+ (no_)?persist_layer_norm
        memory_efficient_layer_norm disable_jit_fuser cuda_graph_\w+ (enable|external)_cuda_graph use_te_activation_func
        use_transformer_engine_op_fuser use_grouped_gemm_for_\w+ mla_down_proj_fusion
        use_(flashinfer_fused_rope|mamba_mem_eff_path)
        disable_mamba_mem_eff_path gdp_\w+ mlp_chunks_for_\w+ nccl_all_reduce_for_prefill enable_experimental
    """,
    "memory": r"""
        recompute_\w+ activations_checkpoint_\w+ (fine_grained_)?activation_offload\w* cpu_offloading\w* offload_modules
        fine_grained_\w+ min_offloaded_tensor_size delta_offload_bytes_across_pp_ranks _cpu_offloading_context
    """,
    "checkpoints": r"""
        save save_\w+ load load_\w+ no_(save|load)_\w+ ckpt_\w+ dist_ckpt_\w+ use_dist_ckpt\w* distrib_optim_\w+
        async_\w+
        auto_detect_ckpt_format fully_parallel_\w+ non_persistent_\w+ use_persistent_ckpt_worker
        exit_on_missing_checkpoint
        use_(checkpoint|mp|tokenizer_model)_(args|from)\w* override_ckpt_iteration verify_integrity most_recent_k
        replication\w*
        strict_fsdp_dtensor_load hetereogenous_dist_checkpoint stream_ckpt_dequant yaml_cfg
    """,
    "logs, health, profiles": r"""
        log_\w+ logging_level set_level_for_all_loggers filter_warnings modules_to_filter tensorboard_\w+ wandb_\w+
        one_logger_\w+
        enable_one_logger otel_\w+ app_tag_run_\w+ timing_log_\w+ barrier_with_L1_time throughput_window_size
        runtime_time_unit
        profile\w* use_(nsys|pytorch)_profiler pytorch_profiler_\w+ nvtx_ranges record_\w+ memory_(snapshot_path|keys)
        config_logger_dir check_\w+ gpu_sniff_test_interval rerun_\w+ error_injection_\w+
        result_rejected_tracker_filename
        straggler_\w+ disable_straggler_on_startup enable_ft_package calc_ft_timeouts ft_\w+ flight_recorder_\w+
        inprocess_\w+
        adlr_autoresume\w* run_workload_inspector_server moe_per_layer_logging moe_routing_trace_\w+ refit_method
    """,
    "inference, reinforcement learning, retrieval, vision": r"""
        inference_\w+ flash_decode max_tokens_to_oom enable_chunked_prefill disable_chunked_prefill
        decode_only_cuda_graphs
        use_legacy_static_engine num_speculative_tokens return_log_probs skip_prompt_log_probs output_bert_embeddings
        cache_mla_latents use_inference_optimized_layers rl_\w+ perform_rl_step grpo_\w+ langrl_\w+ bert_embedder_type
        (offset|use_same)_sampling_seed_\w+ retro_(?!add_retriever)\w+ retriever_\w+ report_topk_accuracies
        faiss_use_gpu
        indexer_\w+ ict_head_size biencoder_\w+ dino_\w+ vision_\w+ swin_backbone_type img_(h|w|dim)
        num_(channels|classes)
        patch_dim
    """,
    "more about a feature that has a switch": r"""
        (q|kv)_lora_rank qk_(head|pos_emb_head)_dim v_head_dim rope_type rotary_scaling_factor mscale(_all_dim)?
        beta_(fast|slow)
        original_max_position_embeddings yarn_\w+ mrope_section mamba_\w+ linear_(conv|key|value|num)_\w+ dsa_\w+
        mhc_\w+ mup_\w+
        mtp_(loss_scaling_factor|use_repeated_layer|standalone|detach_heads) relative_attention_\w+ model_type
        bert_binary_head (encoder|decoder)_num_layers
    """,
    "mixtures of experts: kernels, messages, memory; capacity has a switch": r"""
        moe_(deepep|enable_deepep|hybridep|flex_dispatcher|paged_stash|ncclep|permute_fusion|token_dispatcher)\w*
        moe_(grouped_gemm|use_legacy_grouped_gemm|use_grouped_tensor|single_grouped_weight|layer_recompute|extended_tp)
        moe_(combine_bwd|dispatch_fwd)_dtype moe_router_(fusion|bias_update_rate|quantile_balancing_ema)
        moe_shared_expert_overlap moe_pad_\w+ moe_token_drop_policy moe_expert_rank_capacity_factor
    """,
}
_NEUTRAL = re.compile("|".join(f"(?:{pattern})" for group in _GROUPS.values() for pattern in group.split()))


def is_neutral(name: str) -> bool:
    """Tell whether an argument leaves alone what a model computes from its weights."""
    return name.startswith("_") or _NEUTRAL.fullmatch(name) is not None
