// Config: all options of a training run, as plain values. options.cpp declares each field again
// with its key, help and check.
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
  int64_t kv_heads = 0;    // 0: same as heads
  int64_t head_dim = 0;    // 0: dim / heads
  int64_t ffn = 0;         // 0: 8/3 of dim (llama, qwen2) or 4 times dim (gpt2)
  int64_t max_tokens = 0;  // gpt2: positions; 0: data.seq
  bool tied = false;       // the output layer is the embedding
  double norm_eps = 1e-5;
  double init_std = 0.02;
  double dropout = 0.0;  // gpt2
  double rope_base = 10000;
  std::string rope_scaling = "none";  // none, llama3
  double rope_factor = 8;             // llama3 scaling, like the next three
  double rope_low_freq = 1;
  double rope_high_freq = 4;
  int64_t rope_original_tokens = 8192;
  int64_t width = 2048;  // mlp: of its `layers` linear layers
};

struct DataConfig {
  // Files or folders; empty: LibTorch's C++ headers; {"random"}: random tokens, the same every
  // time.
  std::vector<std::string> train;
  std::vector<std::string> valid;  // likewise; empty: `valid_share` of `train`
  double valid_share = 0.02;
  std::string format = "auto";      // auto, text, nanogpt, llmc, megatron
  std::string tokenizer = "bytes";  // for text: bytes, or a tokenizer.json
  int64_t seq = 256;                // tokens per sample
  bool shuffle = true;
  bool document_mask = false;  // attention stays within a document
  bool loss_mask = false;      // FILE.mask next to each token file says which tokens count
  int64_t prefetch = 2;        // batches loaded ahead; 0: each when it is needed
};

struct TrainConfig {
  int64_t steps = 0;  // exactly one of steps, tokens and epochs is set
  int64_t tokens = 0;
  double epochs = 0;
  int64_t batch = 32;       // samples per step, over all ranks
  int64_t micro_batch = 0;  // samples per pass on each rank; 0: the rank's part of the batch
  int64_t seed = 1;
  double clip = 1.0;            // maximum gradient norm; 0: no clipping
  std::string on_nan = "skip";  // for a non-finite loss or gradient: skip, stop
  int64_t max_skips = 10;       // consecutive skips before the run stops anyway
  int64_t eval_every = 0;       // steps; 0: only at the end
  int64_t eval_batches = 8;     // of `batch` samples; 0: all
  int64_t sample_every = 0;     // steps; 0: only at the end
  int64_t sample_tokens = 200;
  std::string sample_prompt = "";
  double sample_temperature = 0.8;
  bool deterministic = false;  // GPU operators give the same bits every time
  std::string graph = "auto";  // steps as CUDA graphs: auto, on, off
  int64_t profile = 0;         // steps to profile; 0: none
  double grace = 0;            // seconds from a signal to the kill; 0: by recent steps
};

struct OptimConfig {
  std::string type = "adamw";  // adamw, sgd
  double lr = 3e-4;
  double beta1 = 0.9, beta2 = 0.95;
  double eps = 1e-8;
  double weight_decay = 0.1;        // of matrices; none for norms and biases
  double momentum = 0.9;            // sgd
  std::string schedule = "cosine";  // constant, linear, cosine, wsd
  int64_t warmup_steps = 0;
  int64_t decay_steps = 0;  // wsd
  double final_ratio = 0.1;
  bool grad_scaler = true;  // fp16: scales the loss against underflow of gradients
};

struct ShardConfig {
  std::string strategy = "full_shard";  // full_shard, shard_grad_op, no_shard, hybrid_shard
  std::string wrap = "block";           // block, size, root
  int64_t wrap_min_params = 1'000'000;  // for wrap = size
  int64_t shard_ranks = 0;  // hybrid_shard: ranks that share one copy; 0: the ranks of one host
  // Of parameters in operators: fp32, bf16, fp16; auto: bf16 on a GPU, else fp32.
  std::string precision = "auto";
  std::string reduce = "fp32";                 // of gradients in reductions: fp32, bf16, fp16
  std::string gradients = "fp32";              // between backward and the optimizer: fp32, bf16
  std::string reshard_after_forward = "auto";  // auto, true, false, or a number of ranks
  int64_t forward_prefetch = 1;
  int64_t backward_prefetch = 1;
  bool limit_all_gathers = true;
  bool share_host_memory = true;
};

struct ActivationsConfig {
  std::string mode = "none";  // none, selective, feed_forward, full, offload
  int64_t every = 1;          // applies to every n-th block
  int64_t keep_last = 0;      // except the last n
};

struct OffloadConfig {  // see fsdp::Offload
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
  bool at_end = true;     // also after a signal
  bool async = true;      // written in the background, from a copy in host memory
};

struct CommConfig {
  std::string backend = "auto";  // shm, mpi, nccl
  double timeout = 0;            // seconds; 0: FSDP_TIMEOUT, or 300
};

struct LogConfig {
  int64_t every = 10;  // steps between lines without a terminal
  bool tensorboard = true;
  double peak_tflops = 0;            // of one device, for MFU; 0: built in, for known GPUs
  std::vector<std::string> silence;  // names of warnings to turn off
};

struct Config {
  std::string dir = "";  // of the run; empty: runs/NAME, after the config's name
  bool resume = false;
  std::string init_from = "";  // a Hugging Face directory, a run or a checkpoint; empty: none
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
