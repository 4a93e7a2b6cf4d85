// Grapheme clusters: characters that a reader takes for one, as the `tokenizers` package divides a
// text into them (Unicode's extended grapheme clusters).
#pragma once

#include <cstdint>
#include <string_view>

namespace fsdp::data {

// How a character takes part in clusters, in the order of unicode_tables.py. Linkers and
// kConjunctExtend are extenders, too.
enum class ClusterKind : uint8_t {
  kOther,
  kControl,  // stands alone
  kExtend,   // belongs to the character before it, like the next three …
  kConjunctExtend,
  kSpacing,
  kPrepend,     // … and this to the one after it
  kPictograph,  // joined to another by a zero-width joiner
  kConsonant,   // joined to another by a linker
  kLinker,
};

extern const uint32_t kClusterRuns[];  // first character * 16 + kind
extern const int kClusterRunCount;

// The end of the cluster that begins at text[begin], which must exist. The text is valid UTF-8.
size_t cluster_end(std::string_view text, size_t begin);

}  // namespace fsdp::data
