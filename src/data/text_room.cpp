#include "data/text_room.h"

#include "base/format.h"
#include "fsdp/error.h"

namespace fsdp::data {

void TextRoom::refuse(const std::string& where) {
  throw Error(formatted("{} makes more than {} bytes of each byte of a text.", where, kPerByte),
              "the tokenizer.json is damaged or malicious; download it again from its source.");
}

}  // namespace fsdp::data
