// Config: everything that can be chosen about a training run, as plain values.
//
// Each field is declared once more, in options.cpp, with its key, help and check; the flag
// (--optim.lr), the key in a TOML file (lr in [optim]) and the default all follow from that.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace fsdp::train {

struct ModelConfig {
  std::string type = "llama";  // llama, qwen2, gpt2, mlp
  int64_t vocab = 0;           // 0: the tokenizer's
  int64_t dim = 256;
  int64_t layers = 4;
  int64_t heads = 4;
  int64_t kv_heads = 0;    // 0: as heads
  int64_t head_dim = 0;    // 0: dim / heads
  int64_t ffn = 0;         // 0: 8/3 of dim (llama, qwen2) or 4 of dim (gpt2)
  int64_t max_tokens = 0;  // positions a gpt2 has; 0: data.seq
  bool tied = false;       // the head is the embedding
  double norm_eps = 1e-5;
  double init_std = 0.02;
  double dropout = 0.0;  // gpt2
  double rope_base = 10000;
  std::string rope_scaling = "none";  // none, llama3
  double rope_factor = 8;             // of llama3's scaling
  double rope_low_freq = 1;
  double rope_high_freq = 4;
  int64_t rope_original_tokens = 8192;
  int64_t width = 2048;  // of an mlp's linears; layers says how many
};

struct DataConfig {
  // Files or folders; empty: LibTorch's own C++ headers; {"random"}: made up, the same every time.
  std::vector<std::string> train;
  std::vector<std::string> valid;  // likewise; empty: the last `valid_share` of `train`
  double valid_share = 0.02;
  std::string format = "auto";      // auto, text, nanogpt, llmc, megatron
  std::string tokenizer = "bytes";  // for text: bytes, or a tokenizer.json
  int64_t seq = 256;                // tokens in a sample
  bool shuffle = true;
  bool document_mask = false;  // attention stays within a document
  bool loss_mask = false;      // FILE.mask beside each token file says which tokens count
  int64_t prefetch = 2;        // batches loaded ahead; 0: loaded when they are needed
};

struct TrainConfig {
  int64_t steps = 0;  // one of steps, tokens and epochs ends a run
  int64_t tokens = 0;
  double epochs = 0;
  int64_t batch = 32;       // samples in a step, over all ranks
  int64_t micro_batch = 0;  // samples a rank computes at once; 0: all its part of the batch
  int64_t seed = 1;
  double clip = 1.0;            // of the gradient's norm; 0: none
  std::string on_nan = "skip";  // a step whose loss or gradient is not finite: skip, stop
  int64_t max_skips = 10;       // in a row, before the run stops after all
  int64_t eval_every = 0;       // steps; 0: only at the end
  int64_t eval_batches = 8;     // of `batch` samples; 0: all there are
  int64_t sample_every = 0;     // steps; 0: only at the end
  int64_t sample_tokens = 200;
  std::string sample_prompt = "";
  double sample_temperature = 0.8;
  bool deterministic = false;  // a GPU's operators give the same bits every time
  std::string graph = "auto";  // steps as CUDA graphs: auto, on, off
  int64_t profile = 0;         // steps whose time is taken apart; 0: none
  double grace = 0;            // seconds from a signal to the kill; 0: by recent steps
};

struct OptimConfig {
  std::string type = "adamw";  // adamw, sgd
  double lr = 3e-4;
  double beta1 = 0.9, beta2 = 0.95;
  double eps = 1e-8;
  double weight_decay = 0.1;        // of matrices; norms and biases have none
  double momentum = 0.9;            // sgd
  std::string schedule = "cosine";  // constant, linear, cosine, wsd
  int64_t warmup_steps = 0;
  int64_t decay_steps = 0;  // wsd
  double final_ratio = 0.1;
  bool grad_scaler = true;  // precision = fp16: gradients are kept out of the underflow
};

struct ShardConfig {
  std::string strategy = "full_shard";  // full_shard, shard_grad_op, no_shard, hybrid_shard
  std::string wrap = "block";           // block, size, root
  int64_t wrap_min_params = 1'000'000;  // of wrap = size
  int64_t shard_ranks = 0;  // hybrid_shard: ranks that share one copy; 0: those of a host
  // Of parameters in operators: fp32, bf16, fp16; auto: bf16 on a GPU.
  std::string precision = "auto";
  std::string reduce = "fp32";                 // of gradients on their way: fp32, bf16, fp16
  std::string gradients = "fp32";              // of those that wait for the optimizer: fp32, bf16
  std::string reshard_after_forward = "auto";  // auto, true, false, or a number of ranks
  int64_t forward_prefetch = 1;
  int64_t backward_prefetch = 1;
  bool limit_all_gathers = true;
  bool share_host_memory = true;
};

struct ActivationsConfig {    // what backward needs of forward
  std::string mode = "none";  // none, selective, feed_forward, full, offload
  int64_t every = 1;          // of the blocks
  int64_t keep_last = 0;      // blocks that are left alone
};

struct OffloadConfig {  // what lies in host memory; see fsdp::Offload
  bool optimizer = false;
  bool parameters = false;
  bool gradients = false;
  double fraction = 1;
  std::string directory;
  bool step_in_backward = false;
};

struct CheckpointConfig {
  int64_t every = 0;      // steps; 0: only at the end
  int64_t keep_last = 3;  // 0: all
  bool at_end = true;     // also when a signal ends the run
  bool async = true;      // written behind the training, from a copy in host memory
};

struct CommConfig {
  std::string backend = "auto";  // shm, mpi, nccl
  double timeout = 0;            // seconds; 0: FSDP_TIMEOUT, or 300
};

struct LogConfig {
  int64_t every = 10;  // steps between lines, where there is no terminal
  bool tensorboard = true;
  double peak_tflops = 0;            // of one device, for MFU; 0: known GPUs only
  std::vector<std::string> silence;  // names of warnings that are not given
};

struct Config {
  std::string dir = "";  // the run's directory; empty: runs/NAME, NAME of the config file
  bool resume = false;
  std::string init_from = "";  // a Hugging Face directory, a run or a checkpoint; empty: nothing
  ModelConfig model;
  DataConfig data;
  TrainConfig train;
  OptimConfig optim;
  ShardConfig shard;
  CheckpointConfig checkpoint;
  CommConfig comm;
  LogConfig log;
  ActivationsConfig activations;
  OffloadConfig offload;
};

}  // namespace fsdp::train
