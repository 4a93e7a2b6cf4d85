// stream: a tensor of a checkpoint, piece by piece, so that what is made of a model of any size
// needs the memory of one piece.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "checkpoint/source.h"

namespace fsdp::checkpoint {

inline constexpr int64_t kPieceBytes = 64 << 20;

// Is told how many bytes came since its last call. It may throw, which ends the work.
using Advance = std::function<void(int64_t bytes)>;

struct Copied {          // a tensor of a checkpoint that goes into another file
  std::string from;      // its name in the checkpoint ("model.norm.weight")
  std::string to;        // its name there ("norm.weight")
  at::ScalarType dtype;  // what it becomes
};

int64_t count_of(const std::vector<int64_t>& sizes);  // elements; an Error if 64 bits cannot say it
// Bytes of a tensor in another file; of all of them.
int64_t bytes_of(const Source& source, const Copied& tensor);
int64_t bytes_of(const Source& source, const std::vector<Copied>& tensors);

// Cuts a tensor into rectangles of at most `most` elements (and at least one). Each is one stretch
// in row-major order, and they come in that order. None for a tensor without elements.
void for_each_rectangle(const std::vector<int64_t>& sizes, int64_t most,
                        const std::function<void(const Rectangle&)>& take);

// Reads a tensor in such pieces of kPieceBytes and converts it. The memory that `take` is given is
// contiguous and lasts until it returns. An Error, before anything is read, where files do not hold
// all of the tensor.
void stream(Source& source, const std::string& name, at::ScalarType dtype,
            const std::function<void(const Part&)>& take);

// The same for a file that holds the elements in row-major order: hands on the bytes.
void stream_bytes(Source& source, const Copied& tensor,
                  const std::function<void(const void*, size_t)>& take, const Advance& advance);

// Tensors of these names, those that are the same bytes in the files (tied parameters) together.
// Groups and the names in them are in the order of `names`.
std::vector<std::vector<std::string>> by_bytes(const Source& source,
                                               const std::vector<std::string>& names);

// What a floating-point tensor becomes: `wanted` if there is one. Others stay what they are.
at::ScalarType converted(at::ScalarType dtype, const std::optional<at::ScalarType>& wanted);

}  // namespace fsdp::checkpoint
