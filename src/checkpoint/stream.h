// stream: reads a tensor of a checkpoint piece by piece, so that converting a model of any size
// needs the memory of one piece only.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "checkpoint/source.h"

namespace fsdp::checkpoint {

inline constexpr int64_t kPieceBytes = 64 << 20;

// Called with the bytes processed since its last call. It may throw to cancel the work.
using Advance = std::function<void(int64_t bytes)>;

struct Copied {          // a tensor of a checkpoint that is copied to another file
  std::string from;      // name in the checkpoint ("model.norm.weight")
  std::string to;        // name in the file ("norm.weight")
  at::ScalarType dtype;  // in the file

  // Copies this part alone; a first dimension of one isn't in the file. nullopt: all.
  std::optional<Rectangle> part = {};

  // Changes the values of a float32 piece, before they get their dtype. Empty: they stay.
  std::function<void(const Part&)> change = {};
};

int64_t count_of(const std::vector<int64_t>& sizes);  // elements; an Error on overflow
std::vector<int64_t> sizes_of(const Source& source, const Copied& tensor);  // in the new file
// Bytes in the new file, of one tensor and of all.
int64_t bytes_of(const Source& source, const Copied& tensor);
int64_t bytes_of(const Source& source, const std::vector<Copied>& tensors);

// Cuts a tensor into rectangles of at most `most` elements (at least one). Each is contiguous in
// row-major order, and they come in that order. An empty tensor has none.
void for_each_rectangle(const std::vector<int64_t>& sizes, int64_t most,
                        const std::function<void(const Rectangle&)>& take);

// Reads a tensor in such pieces of kPieceBytes and converts it. The memory passed to `take` is
// contiguous and valid until `take` returns. An Error, before anything is read, if the files don't
// hold all of the tensor.
void stream(Source& source, const std::string& name, at::ScalarType dtype,
            const std::function<void(const Part&)>& take);
// The same of a rectangle of it.
void stream(Source& source, const std::string& name, const Rectangle& wanted, at::ScalarType dtype,
            const std::function<void(const Part&)>& take);

// The same for a file that holds the elements in row-major order: passes on the bytes.
void stream_bytes(Source& source, const Copied& tensor,
                  const std::function<void(const void*, size_t)>& take, const Advance& advance);

// Groups names whose tensors are the same bytes in the files (tied parameters). Groups, and the
// names in each, are in the order of `names`.
std::vector<std::vector<std::string>> by_bytes(const Source& source,
                                               const std::vector<std::string>& names);

// An Error if these tensors have more bytes than the files that hold them: a new file must not be
// many times as large as the checkpoint because its tensors use the same bytes again and again.
void check_amount(Source& source, const std::vector<std::string>& names);

// The dtype after conversion: `wanted`, if set, for floating-point tensors; others keep theirs.
at::ScalarType converted(at::ScalarType dtype, const std::optional<at::ScalarType>& wanted);

}  // namespace fsdp::checkpoint
