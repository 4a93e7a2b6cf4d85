// Sources made of text. See source.h.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "data/files.h"
#include "data/source.h"

namespace fsdp::data {

// Bytes of the files themselves, an end-of-document token behind each: nothing is copied or kept.
std::shared_ptr<TokenSource> bytes_source(const std::vector<FoundFile>& files, int32_t end);

// Text that is tokenised now, on all cores, or was before: the tokens are kept in `cache_dir` under
// a name that depends on the files (paths, sizes, times) and on the tokenizer. Without a cache_dir
// they stay in memory. Processes that want the same tokens at the same time wait for one to make
// them.
std::shared_ptr<TokenSource> tokenised_source(const std::vector<FoundFile>& files,
                                              std::shared_ptr<const Tokenizer> tokenizer,
                                              const std::string& cache_dir);

// Tokenises files in order, in batches that fit into memory, and hands on each document's ids, the
// end of document included. `progress` gets the bytes done so far.
void tokenise_files(const std::vector<FoundFile>& files, const Tokenizer& tokenizer, int threads,
                    const std::function<void(std::vector<int32_t>&&)>& document,
                    const std::function<void(int64_t)>& progress = {});

// One after the other.
std::shared_ptr<TokenSource> joined(std::vector<std::shared_ptr<TokenSource>> parts);

// A source over a token file, which `open_source` makes for each.
std::shared_ptr<TokenSource> file_source(const std::string& path, const std::string& format,
                                         bool mask);

}  // namespace fsdp::data
