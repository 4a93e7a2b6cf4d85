// Items and metadata: any part of what was written reads back unchanged, and damage is an error.
#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <random>

#include "base/deadline.h"
#include "base/regular_file.h"
#include "checkpoint/metadata.h"
#include "checkpoint/test_files.h"
#include "checkpoint/zip.h"
#include "fsdp/error.h"

namespace fsdp::checkpoint {
namespace {

namespace fs = std::filesystem;

// --- sums ---

// By its definition, one bit at a time.
uint32_t crc32_of(std::string_view bytes) {
  uint32_t sum = ~0u;
  for (const char c : bytes) {
    sum ^= static_cast<unsigned char>(c);
    for (int bit = 0; bit < 8; ++bit) sum = sum >> 1 ^ (sum & 1 ? 0xedb88320u : 0);
  }
  return ~sum;
}

TEST(ArchiveSums, AreTheCrc32OfARecordHoweverItsBytesCome) {
  EXPECT_EQ(crc32_of("123456789"), 0xcbf43926u);  // the check value of zip's CRC-32
  std::mt19937 random(3);
  std::string bytes((5 << 20) + 7, '\0');
  for (char& c : bytes) c = static_cast<char>(random());
  const Folder folder;
  files::Output out(folder / "file");
  ArchiveWriter archive(out);
  for (const size_t size : {size_t{0}, size_t{9}, size_t{1000}, bytes.size()}) {
    archive.add("whole", std::string_view(bytes).substr(0, size));
    EXPECT_EQ(archive.last_sum(), crc32_of(std::string_view(bytes).substr(0, size))) << size;
  }
  archive.begin("pieces", static_cast<int64_t>(bytes.size()));
  for (size_t at = 0, size; at < bytes.size(); at += size) {
    size = std::min<size_t>(random() % 100000, bytes.size() - at);
    archive.data(bytes.data() + at, size);
  }
  archive.end();
  EXPECT_EQ(archive.last_sum(), crc32_of(bytes));
}

// --- items ---

std::vector<at::Tensor> samples() {
  at::manual_seed(3);
  const auto numbers = at::randn({4, 3, 5, 2});
  std::vector<at::Tensor> all = {at::full({}, 2.5),
                                 at::zeros({0, 3}),
                                 at::randn({7}),
                                 at::randn({5, 9}),
                                 numbers,
                                 numbers.contiguous(at::MemoryFormat::ChannelsLast),
                                 at::randn({6, 4}).t(),
                                 at::randn({1, 1, 3})};
  for (auto type : {at::kDouble, at::kBFloat16, at::kHalf, at::kLong, at::kInt, at::kShort,
                    at::kChar, at::kByte, at::kBool, at::kUInt16, at::kFloat8_e4m3fn})
    all.push_back((at::randn({3, 5}) * 4).abs().to(type));
  return all;
}

HostBlocks blocks;

TEST(Items, TensorsInOneFileReadBackUnchanged) {
  Folder folder;
  const auto tensors = samples();
  std::vector<ItemPlace> places;
  files::Output out(folder.path / "items");
  for (const auto& tensor : tensors) places.push_back(write_tensor(out, tensor));
  out.close();
  const files::Input in(folder.path / "items");
  for (size_t i = 0; i < tensors.size(); ++i) {
    SCOPED_TRACE(i);
    EXPECT_EQ(places[i].offset % 64, 0);
    const auto stored = find_tensor(in, places[i], "it");
    EXPECT_EQ(stored.dtype, tensors[i].scalar_type());
    EXPECT_EQ(stored.sizes, tensors[i].sizes().vec());
    EXPECT_EQ(stored.offset % 64, 0);
    at::Tensor back = at::empty(tensors[i].sizes(), tensors[i].options());
    read_part(in, stored, std::vector<int64_t>(back.dim(), 0), back, blocks);
    EXPECT_TRUE(at::equal(back.to(at::kDouble), tensors[i].to(at::kDouble)));
  }
}

TEST(Items, AnyPartIsReadIntoAnyMemory) {
  Folder folder;
  std::mt19937 random(5);
  const auto below = [&](int64_t n) { return static_cast<int64_t>(random() % n); };
  files::Output out(folder.path / "items");
  std::vector<at::Tensor> tensors = {
      at::randn({6, 5, 7}), at::randn({6, 5, 7}).permute({2, 0, 1}),
      at::randn({5, 4, 3, 2}).contiguous(at::MemoryFormat::ChannelsLast)};
  std::vector<ItemPlace> places;
  for (const auto& tensor : tensors) places.push_back(write_tensor(out, tensor));
  out.close();
  const files::Input in(folder.path / "items");
  for (size_t i = 0; i < tensors.size(); ++i) {
    const auto stored = find_tensor(in, places[i], "it");
    for (int trial = 0; trial < 200; ++trial) {
      std::vector<int64_t> from;
      at::Tensor expected = tensors[i];
      for (int64_t d = 0; d < expected.dim(); ++d) {
        from.push_back(below(tensors[i].size(d)));
        expected = expected.narrow(d, from[d], 1 + below(tensors[i].size(d) - from[d]));
      }
      // Into a part of a larger tensor, in another order, and perhaps of another dtype.
      std::vector<int64_t> larger;
      for (int64_t size : expected.sizes()) larger.push_back(size + below(3));
      at::Tensor memory = at::zeros(larger, trial % 3 == 0 ? at::kDouble : at::kFloat);
      if (trial % 2 == 0) memory = memory.transpose(0, 1).contiguous().transpose(0, 1);
      at::Tensor into = memory;
      for (int64_t d = 0; d < into.dim(); ++d) into = into.narrow(d, 0, expected.size(d));
      read_part(in, stored, from, into, blocks);
      EXPECT_TRUE(at::equal(into, expected.to(into.scalar_type())));
      EXPECT_EQ(memory.count_nonzero().item<int64_t>(), into.numel());  // nothing else was written
    }
  }
}

TEST(Items, PartsOfLargeTensorsAreReadInPieces) {
  Folder folder;
  const auto large = at::arange(3000 * 2000, at::kFloat).view({3000, 2000});
  files::Output out(folder.path / "items");
  const auto place = write_tensor(out, large);
  out.close();
  const files::Input in(folder.path / "items");
  const auto stored = find_tensor(in, place, "it");
  const auto expect = [&](int64_t row, int64_t rows, int64_t column, int64_t columns,
                          at::ScalarType type) {
    at::Tensor into = at::zeros({rows, columns}, type);
    read_part(in, stored, {row, column}, into, blocks);
    EXPECT_TRUE(at::equal(into, large.narrow(0, row, rows).narrow(1, column, columns).to(type)));
  };
  expect(0, 3000, 0, 2000, at::kFloat);   // straight into place
  expect(0, 3000, 0, 2000, at::kDouble);  // in blocks
  expect(5, 2900, 0, 2000, at::kFloat);
  expect(1, 2998, 3, 1900, at::kFloat);  // rows with gaps
  expect(0, 3000, 7, 1, at::kFloat);     // a column
}

// More than all blocks of a file that are written at a time.
TEST(Items, ALargeFileHoldsEveryByteInOrder) {
  Folder folder;
  const auto path = folder.path / "large";
  const int64_t size = (70 << 20) + 12345;
  const auto bytes = at::randint(256, {size}, at::kByte);
  const auto* data = static_cast<const char*>(bytes.const_data_ptr());
  for (const int64_t expected : {size, int64_t{0}}) {  // past the page cache, and through it
    files::Output out(path, expected);
    for (int64_t at = 0, step = 1; at < size; at += step, step = std::min(step * 3, size - at))
      out.append(data + at, static_cast<size_t>(step));
    const FileSums sums = out.close();
    EXPECT_EQ(sums.size, size);
    const files::Input in(path, &sums);
    at::Tensor back = at::empty_like(bytes);
    in.read(0, back.data_ptr(), static_cast<size_t>(size));
    EXPECT_TRUE(at::equal(back, bytes));
  }
}

TEST(Items, UnusedReservedSpaceIsFreed) {
  Folder folder;
  files::Output out(folder.path / "items", 10 << 20);
  out.append("text");
  out.close();
  EXPECT_EQ(fs::file_size(folder.path / "items"), 4u);
}

TEST(Items, DamageIsAnErrorThatNamesTheFile) {
  Folder folder;
  const auto path = folder.path / "items";
  files::Output out(path);
  const auto tensor = at::randn({40, 30});
  const auto place = write_tensor(out, tensor);
  out.close();
  const auto bytes = files::read_whole(path, 1 << 20);
  const auto look = [&] {
    return error_of([&] {
      const files::Input in(path);
      const auto stored = find_tensor(in, place, "\"it\"");
      if (stored.sizes.size() > 4 || stored.dtype != at::kFloat) return;  // changed, but in bounds
      at::Tensor into = at::empty(stored.sizes);
      read_part(in, stored, std::vector<int64_t>(stored.sizes.size(), 0), into, blocks);
    });
  };
  EXPECT_EQ(look(), "");
  // Changes every byte around the data in a few ways: an error, or a different tensor within the
  // file, but nothing worse.
  std::fstream file(path, std::ios::binary | std::ios::in | std::ios::out);
  const auto put = [&](size_t at, char byte) {
    file.seekp(static_cast<std::streamoff>(at));
    file.put(byte).flush();
  };
  int errors = 0;
  for (size_t at = 0; at < bytes.size(); ++at) {
    if (at > 900 && at + 900 < bytes.size()) continue;
    for (const int change : {0x01, 0x80, 0xff}) {
      put(at, static_cast<char>(bytes[at] ^ change));
      errors += look().empty() ? 0 : 1;
    }
    put(at, bytes[at]);
  }
  EXPECT_GT(errors, 500);
  EXPECT_EQ(look(), "");
  for (size_t length = bytes.size() - 1; length > 37; length -= 37) {
    fs::resize_file(path, length);
    const auto error = look();
    EXPECT_TRUE(has(error, "items") && has(error, "\"it\"")) << length << ": " << error;
  }
}

TEST(Items, ACompressedArchiveIsRefused) {
  Folder folder;
  const auto path = folder.path / "items";
  files::Output out(path);
  const auto place = write_tensor(out, at::randn({4}));
  out.close();
  auto bytes = files::read_whole(path, 1 << 20);
  const size_t entry = bytes.find("PK\x01\x02");
  ASSERT_NE(entry, std::string::npos);
  bytes[entry + 10] = 8;  // deflate
  std::ofstream(path, std::ios::binary) << bytes;
  const auto error = error_of([&] { find_tensor(files::Input(path), place, "\"it\""); });
  EXPECT_TRUE(has(error, "compressed")) << error;
}

// A tensor of the given sizes and strides whose storage holds `numbers`, in one item.
ItemPlace write_view(files::Output& out, const std::vector<int64_t>& sizes,
                     const std::vector<int64_t>& strides, const std::vector<float>& numbers) {
  pickle::Writer writer;
  put_tensor(writer, at::kFloat, sizes, strides, "0");
  out.align(64);
  ItemPlace place{out.path().filename().string(), out.position(), 0};
  ArchiveWriter archive(out);
  archive.add("data.pkl", writer.finish());
  archive.add("byteorder", "little");
  archive.add("data/0", {reinterpret_cast<const char*>(numbers.data()), 4 * numbers.size()});
  place.length = archive.finish();
  return place;
}

TEST(HostileItems, StridesThatRepeatElementsAreRefused) {
  Folder folder;
  const auto error = [&](const std::vector<int64_t>& sizes, const std::vector<int64_t>& strides) {
    files::Output out(folder / "items");
    const auto place = write_view(out, sizes, strides, {1, 2, 3, 4});
    out.close();
    return error_of([&] { find_tensor(files::Input(folder / "items"), place, "\"it\""); });
  };
  EXPECT_EQ(error({4}, {1}), "");
  EXPECT_EQ(error({2, 2}, {1, 2}), "");
  EXPECT_EQ(error({2}, {3}), "");
  EXPECT_EQ(error({0, 1 << 30}, {0, 0}), "");
  for (const auto& [sizes, strides] :
       {std::pair<std::vector<int64_t>, std::vector<int64_t>>{{int64_t{1} << 40}, {0}},
        {{1 << 20, 1 << 20}, {0, 0}},
        {{4, 2}, {1, 0}},
        {{3, 3}, {1, 0}}}) {
    const std::string what = error(sizes, strides);
    EXPECT_TRUE(has(what, "items") && has(what, "\"it\"") && has(what, "repeat")) << what;
  }
}

TEST(HostileItems, AFifoInPlaceOfAFileIsRefused) {
  const test::WithDeadline deadline;
  Folder folder;
  ASSERT_EQ(::mkfifo((folder / "items").c_str(), 0600), 0);
  EXPECT_TRUE(has(error_of([&] { files::Input(folder / "items"); }), "it is a FIFO"));
  EXPECT_TRUE(has(error_of([&] { files::Output(folder / "items"); }), "it is a FIFO"));
  ASSERT_EQ(::mkfifo((folder / ".metadata").c_str(), 0600), 0);
  EXPECT_TRUE(has(error_of([&] { read_metadata(folder.path); }), "it is a FIFO"));
}

// --- metadata ---

Metadata sample() {
  Metadata metadata;
  const KeyPath weight = {"model", "layers.0.weight"};
  metadata.add_chunk(weight, at::kFloat, {4, 3}, {{{0, 0}, {2, 3}}, {"__0_0.distcp", 0, 1000}});
  metadata.add_chunk(weight, at::kFloat, {4, 3}, {{{2, 0}, {2, 3}}, {"__1_0.distcp", 64, 1000}});
  metadata.add_chunk({"model", "scale"}, at::kBFloat16, {},
                     {{{}, {}}, {"__0_0.distcp", int64_t{1} << 40, 10}});
  metadata.add_value({"optim", "param_groups", int64_t{0}, "lr"}, {"__0_0.distcp", 5, 6});
  return metadata;
}

TEST(MetadataFile, ReadsBackUnchanged) {
  const auto back = decode(encode(sample()), "here");
  ASSERT_EQ(back.tensors.size(), 2u);
  const auto& weight = back.tensors.at("model.layers.0.weight");
  EXPECT_EQ(weight.dtype, at::kFloat);
  EXPECT_EQ(weight.sizes, (std::vector<int64_t>{4, 3}));
  ASSERT_EQ(weight.chunks.size(), 2u);
  EXPECT_EQ(weight.chunks[1].rectangle, (Rectangle{{2, 0}, {2, 3}}));
  EXPECT_EQ(weight.chunks[1].place.file, "__1_0.distcp");
  EXPECT_EQ(weight.chunks[1].place.offset, 64);
  EXPECT_EQ(weight.chunks[1].place.length, 1000);
  EXPECT_EQ(back.tensors.at("model.scale").dtype, at::kBFloat16);
  EXPECT_EQ(back.tensors.at("model.scale").chunks[0].place.offset, int64_t{1} << 40);
  EXPECT_EQ(back.values.at("optim.param_groups.0.lr").offset, 5);
  EXPECT_EQ(back.paths, sample().paths);
}

TEST(MetadataFile, ImpossibleContentsAreRefused) {
  const auto refused = [](const std::function<void(Metadata&)>& change) {
    Metadata metadata = sample();
    change(metadata);
    const auto bytes = encode(metadata);
    const auto error = error_of([&] { decode(bytes, "here"); });
    EXPECT_TRUE(has(error, "here")) << error;
    return error;
  };
  const auto chunk = [](Metadata& metadata) -> StoredChunk& {
    return metadata.tensors.at("model.layers.0.weight").chunks[1];
  };
  for (const std::string file : {"../secret", "/etc/passwd", "", "..", "a/b"})
    EXPECT_TRUE(has(refused([&](Metadata& m) { chunk(m).place.file = file; }), "outside"));
  refused([&](Metadata& m) { chunk(m).place.offset = -1; });
  refused([&](Metadata& m) { chunk(m).place.length = -1; });
  EXPECT_TRUE(has(refused([&](Metadata& m) { chunk(m).rectangle.offsets = {3, 0}; }), "[4, 3]"));
  refused([&](Metadata& m) { chunk(m).rectangle.sizes = {2, 4}; });
  refused([&](Metadata& m) { chunk(m).rectangle.sizes = {2}; });
  refused([&](Metadata& m) { chunk(m).rectangle.offsets = {-1, 0}; });
  refused([&](Metadata& m) {
    m.tensors.at("model.layers.0.weight").sizes = {4, int64_t{1} << 62};
  });
  EXPECT_TRUE(has(error_of([&] { decode("\x80\x02N.", "here"); }), "Metadata"));
}

// Bytes that the process has taken from the system while `act` runs, at most.
int64_t memory_for(const std::function<void()>& act) {
  const auto resident = [] {
    const std::string text = read_if_there("/proc/self/status");
    return std::stoll(text.substr(text.find("VmHWM:") + 6)) * 1024;
  };
  std::ofstream("/proc/self/clear_refs") << 5;  // the high-water mark begins at the present use
  const int64_t before = resident();
  act();
  return resident() - before;
}

// Values of a pickle may be used many times, so a small one could stand for any number of copies.
TEST(MetadataFile, MemoryAndTimeAreAMultipleOfTheFile) {
  const test::WithDeadline deadline;
  const std::string head = "\x80\x02";
  std::map<std::string, std::string> files;
  std::string& marks = files["empty lists"] = head + "(";
  marks.append(1 << 20, ']');
  files["nothing"] = head + "(" + std::string(1 << 20, 'N');
  files["small numbers"] = head + "(";
  for (int i = 0; i < 1 << 19; ++i) files["small numbers"] += "K\x01";
  std::string& laughs = files["lists of lists"] = head + "]q" + std::string(1, '\0');
  for (char level = 0; level < 60; ++level) {
    laughs += "](";
    for (int i = 0; i < 5'000; ++i) laughs += std::string("h") + level;
    laughs += "eq" + std::string(1, static_cast<char>(level + 1));
  }
  for (const auto& [what, text] : files) {
    const int64_t bytes = memory_for([&] { error_of([&] { decode(text + ".", "here"); }); });
    EXPECT_LT(bytes, 200 * static_cast<int64_t>(text.size()) + (16 << 20)) << what;
  }
}

TEST(MetadataFile, LongNamesAreRefused) {
  Metadata metadata = sample();
  const std::string name(5'000, 'x');
  metadata.add_value({name}, {"__0_0.distcp", 5, 6});
  const std::string error = error_of([&] { decode(encode(metadata), "here"); });
  EXPECT_TRUE(has(error, "here: \"xxx") && has(error, "a name of 5000 bytes")) << error;
}

TEST(MetadataFile, ChangedOrTruncatedBytesNeverCrash) {
  const auto bytes = encode(sample());
  for (size_t at = 0; at < bytes.size(); ++at) {
    EXPECT_NE(error_of([&] { decode(bytes.substr(0, at), "here"); }), "");
    for (const int change : {0x01, 0x10, 0x80, 0xff}) {
      std::string changed = bytes;
      changed[at] = static_cast<char>(changed[at] ^ change);
      error_of([&] { decode(changed, "here"); });
    }
  }
}

}  // namespace
}  // namespace fsdp::checkpoint
