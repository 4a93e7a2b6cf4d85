// Sources made of text. See source.h.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "data/files.h"
#include "data/source.h"

namespace fsdp::data {

// The bytes of the files, each followed by an end-of-document token. Nothing is copied or cached.
std::shared_ptr<TokenSource> bytes_source(const std::vector<FoundFile>& files, int32_t end);

// Text tokenized on all cores. The tokens are cached in `cache_dir` under a name derived from the
// files (paths, sizes, times) and the tokenizer; without a cache_dir they stay in memory. Processes
// that want the same tokens at the same time wait for the one that makes them.
std::shared_ptr<TokenSource> tokenised_source(const std::vector<FoundFile>& files,
                                              std::shared_ptr<const Tokenizer> tokenizer,
                                              const std::string& cache_dir);

// The documents of JSON lines, all of one kind; cached likewise. With options.loss_mask it has the
// mask of conversations and completions.
std::shared_ptr<TokenSource> lines_source(const std::vector<FoundFile>& files,
                                          const SourceOptions& options);

// Tokenizes files in order, in batches that fit in memory. `document` gets the ids of each file,
// including the end of the document; `progress` gets the number of bytes done so far.
void tokenise_files(const std::vector<FoundFile>& files, const Tokenizer& tokenizer, int threads,
                    const std::function<void(std::vector<int32_t>&&)>& document,
                    const std::function<void(int64_t)>& progress = {});

// Concatenates sources.
std::shared_ptr<TokenSource> joined(std::vector<std::shared_ptr<TokenSource>> parts);

// A source over one token file.
std::shared_ptr<TokenSource> file_source(const std::string& path, Format format, bool mask);

}  // namespace fsdp::data
