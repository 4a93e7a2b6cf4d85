// The parts of `fsdp ckpt export`, `import` and `consolidate`: tensors copied from a checkpoint to
// other files piece by piece.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <functional>

#include "base/deadline.h"
#include "checkpoint/cover.h"
#include "checkpoint/import.h"
#include "checkpoint/safetensors_write.h"
#include "checkpoint/stream.h"
#include "checkpoint/test_files.h"
#include "checkpoint/torch_file.h"
#include "fsdp/error.h"
#include "fsdp/models/llama.h"
#include "models/parameter_shapes.h"

namespace fsdp::checkpoint {
namespace {

namespace fs = std::filesystem;

std::string text_of(const fs::path& file) {
  return files::read_whole(file, 1 << 20);
}

std::vector<std::string> names_in(const fs::path& dir) {
  std::vector<std::string> names;
  for (const auto& entry : fs::directory_iterator(dir))
    names.push_back(entry.path().filename().string());
  std::sort(names.begin(), names.end());
  return names;
}

// A checkpoint as Python writes one, without a manifest.
struct PythonCheckpoint {
  explicit PythonCheckpoint(fs::path at) : dir(std::move(at)) {
    fs::create_directories(dir);
    out = std::make_unique<files::Output>(dir / "__0_0.distcp");
  }
  void add(const std::vector<KeyPath>& paths, const at::Tensor& tensor,
           const std::vector<Rectangle>& cuts) {
    for (const auto& cut : cuts) {
      at::Tensor part = tensor;
      for (int64_t d = 0; d < tensor.dim(); ++d)
        part =
            part.narrow(d, cut.offsets[static_cast<size_t>(d)], cut.sizes[static_cast<size_t>(d)]);
      const ItemPlace place = write_tensor(*out, part.contiguous());
      for (const auto& path : paths)
        metadata.add_chunk(path, tensor.scalar_type(), tensor.sizes().vec(), {cut, place});
    }
  }
  void add(const std::vector<KeyPath>& paths, const at::Tensor& tensor) {
    add(paths, tensor,
        {{std::vector<int64_t>(static_cast<size_t>(tensor.dim()), 0), tensor.sizes().vec()}});
  }
  void add(const KeyPath& path, int64_t value) {
    metadata.add_value(path, write_value(*out, [&](pickle::Writer& w) { w.integer(value); }));
  }
  fs::path finish() {
    out->close();
    files::write_whole(dir / ".metadata", encode(metadata));
    return dir;
  }
  fs::path dir;
  Metadata metadata;
  std::unique_ptr<files::Output> out;
};

KeyPath model(const std::string& name) {
  return {std::string("model"), name};
}

// Says that the tensor has more elements than its item does.
void stretch(Metadata& metadata, const std::string& name, int64_t size) {
  TensorEntry& entry = metadata.tensors.at(name);
  entry.sizes = {size};
  entry.chunks[0].rectangle.sizes = {size};
}

// --- pieces ---

TEST(Pieces, AreContiguousAndInOrder) {
  for (const std::vector<int64_t>& sizes :
       {std::vector<int64_t>{}, {1}, {10}, {3, 4}, {2, 3, 5}, {1, 7, 1, 3}, {5, 1}, {4, 0, 2}}) {
    const at::Tensor numbers = at::arange(count_of(sizes)).view(sizes);
    for (int64_t most : {1, 2, 3, 4, 5, 7, 15, 16, 1000}) {
      int64_t next = 0;
      for_each_rectangle(sizes, most, [&](const Rectangle& piece) {
        ASSERT_LE(count_of(piece.sizes), most);
        at::Tensor part = numbers;
        for (size_t d = 0; d < sizes.size(); ++d)
          part = part.narrow(static_cast<int64_t>(d), piece.offsets[d], piece.sizes[d]);
        const int64_t count = part.numel();
        ASSERT_GT(count, 0);
        ASSERT_TRUE(at::equal(part.reshape({-1}), at::arange(next, next + count)));
        next += count;
      });
      EXPECT_EQ(next, count_of(sizes)) << shape_text(sizes) << " by " << most;
    }
  }
}

TEST(Pieces, CountsThatOverflowAreRefused) {
  const int64_t huge = int64_t{1} << 40;
  EXPECT_TRUE(has(error_of([&] { count_of({huge, huge}); }), "impossible number of elements"));
  EXPECT_EQ(count_of({huge, huge, 0}), 0);
}

TEST(Streams, GiveATensorInRowMajorOrderHoweverItIsSplit) {
  Folder folder;
  PythonCheckpoint made(folder.path / "ckpt");
  const at::Tensor tensor = at::randn({6, 5});
  made.add({model("a")}, tensor,
           {{{0, 0}, {3, 5}}, {{3, 0}, {3, 2}}, {{3, 2}, {2, 3}}, {{5, 2}, {1, 3}}});
  made.add({model("scalar")}, at::scalar_tensor(2.5));
  Source source(made.finish());
  for (const auto dtype : {at::kFloat, at::kBFloat16, at::kDouble}) {
    at::Tensor found = at::empty({0}, dtype);
    stream(source, "model.a", dtype, [&](const Part& part) {
      found = at::cat({found, part.memory.reshape({-1})});
    });
    EXPECT_TRUE(at::equal(found.view({6, 5}), tensor.to(dtype)));
  }
  std::string bytes;
  int64_t told = 0;
  stream_bytes(
      source, {"model.scalar", "scalar", at::kFloat},
      [&](const void* data, size_t size) { bytes.append(static_cast<const char*>(data), size); },
      [&](int64_t more) { told += more; });
  EXPECT_EQ(bytes, std::string("\0\0\x20\x40", 4));
  EXPECT_EQ(told, 4);
}

// --- files ---

TEST(SafetensorsFiles, HoldTheTensorsOfTheCheckpoint) {
  Folder folder;
  PythonCheckpoint made(folder.path / "ckpt");
  const at::Tensor a = at::randn({3, 4}), b = at::arange(5, at::kByte), c = at::randn({2});
  made.add({model("a")}, a);
  made.add({model("b")}, b);
  made.add({model("c")}, c);
  made.add({model("none")}, at::empty({0, 3}));
  Source source(made.finish());
  const fs::path file = folder.path / "x.safetensors";
  write_safetensors(source, file,
                    {{"model.b", "b", at::kByte},
                     {"model.c", "c", at::kBFloat16},
                     {"model.none", "none", at::kFloat},
                     {"model.a", "a", at::kFloat}},
                    {{"format", "pt"}}, nullptr);
  const files::Input input(file);
  const SafeHeader header = read_header(input);
  EXPECT_EQ(header.metadata.at("format"), "pt");
  std::map<std::string, at::Tensor> found;
  for (const auto& tensor : header.tensors) {
    at::Tensor values = at::empty(tensor.sizes, at::TensorOptions().dtype(tensor.dtype));
    EXPECT_EQ(tensor.begin % static_cast<int64_t>(values.element_size()), 0) << tensor.name;
    input.read(header.data + tensor.begin, values.data_ptr(), values.nbytes());
    found[tensor.name] = values;
  }
  EXPECT_TRUE(at::equal(found.at("a"), a));
  EXPECT_TRUE(at::equal(found.at("b"), b));
  EXPECT_TRUE(at::equal(found.at("c"), c.to(at::kBFloat16)));
  EXPECT_EQ(found.at("none").sizes(), (std::vector<int64_t>{0, 3}));
}

TEST(SafetensorsFiles, AreSplitBySize) {
  Folder folder;
  PythonCheckpoint made(folder.path / "ckpt");
  std::vector<Copied> tensors;
  for (int i = 0; i < 5; ++i) {
    const std::string name = "t" + std::to_string(i);
    made.add({model(name)}, at::full({25}, i));  // 100 bytes
    tensors.push_back({"model." + name, name, at::kFloat});
  }
  Source source(made.finish());
  const auto write = [&](int64_t most) {
    const fs::path dir = folder.path / std::to_string(most);
    fs::create_directory(dir);
    write_safetensors_shards(source, dir, tensors, most, {}, nullptr);
    for (const auto& name : names_in(dir)) EXPECT_TRUE(is_safetensors_shard(name)) << name;
    return names_in(dir).size();
  };
  EXPECT_EQ(write(500), 1u);
  EXPECT_EQ(write(499), 3u);  // two files and the index
  EXPECT_EQ(write(200), 4u);
  EXPECT_EQ(write(1), 6u);  // a tensor is never split
  const std::string index = text_of(folder.path / "200" / "model.safetensors.index.json");
  EXPECT_TRUE(has(index, "\"total_size\": 500"));
  EXPECT_TRUE(has(index, "\"t4\": \"model-00003-of-00003.safetensors\""));
  EXPECT_FALSE(is_safetensors_shard("model-1-of-2.safetensors"));
  EXPECT_FALSE(is_safetensors_shard("model-00001-of-00002.safetensors.bak"));
}

TEST(TorchFiles, WriteTiedTensorsOnce) {
  Folder folder;
  PythonCheckpoint made(folder.path / "ckpt");
  made.add({model("head"), model("embedding")}, at::randn({8, 4}));
  made.add({model("other")}, at::randn({8, 4}));
  made.add({std::string("extra"), std::string("step")}, 7);
  Source source(made.finish());
  EXPECT_EQ(
      by_bytes(source, {"model.embedding", "model.head", "model.other"}),
      (std::vector<std::vector<std::string>>{{"model.embedding", "model.head"}, {"model.other"}}));
  EXPECT_EQ(TorchFile(source, {}).bytes(), 2 * 8 * 4 * 4);
  EXPECT_EQ(TorchFile(source, {.dtype = at::kBFloat16}).bytes(), 2 * 8 * 4 * 2);
  const TorchFile file(source, {.model_only = true});
  file.write(folder.path / "x.pt", nullptr);
  EXPECT_TRUE(file.left_out().empty());
  EXPECT_GT(fs::file_size(folder.path / "x.pt"), 256u);
}

TEST(TorchFiles, RefuseNamesThatContradictEachOther) {
  Folder folder;
  const auto problem = [&](const std::string& dir, const std::vector<KeyPath>& paths) {
    PythonCheckpoint made(folder.path / dir);
    int number = 0;
    for (const auto& path : paths) {
      const std::string name = "n" + std::to_string(number++);
      made.metadata.values[name] =
          write_value(*made.out, [](pickle::Writer& writer) { writer.integer(1); });
      made.metadata.paths[name] = path;
    }
    Source source(made.finish());
    return error_of([&] { TorchFile file(source, {}); });
  };
  const std::string a = "a", b = "b";
  EXPECT_EQ(problem("good", {{a, int64_t{0}}, {a, int64_t{1}}, {b, a}}), "");
  EXPECT_TRUE(has(problem("inside", {{a}, {a, b}}), "nested inside of a value"));
  EXPECT_TRUE(has(problem("around", {{a, b}, {a}}), "same path as another entry"));
  EXPECT_TRUE(has(problem("twice", {{a, b}, {a, b}}), "same path as another entry"));
  EXPECT_TRUE(has(problem("mixed", {{a, b}, {a, int64_t{0}}}), "item of a dict"));
  EXPECT_TRUE(has(problem("far", {{a, int64_t{1} << 60}}), "fewer values"));
  EXPECT_TRUE(has(problem("below", {{a, int64_t{-1}}}), "fewer values"));
  EXPECT_TRUE(has(problem("deep", {KeyPath(100, PathKey(a))}), "too deeply"));
}

// A checkpoint of some kilobytes stood for a file of a terabyte.
TEST(HostileSizes, ATensorNeedsItsBytesInTheCheckpoint) {
  const test::WithDeadline deadline;
  Folder folder;
  PythonCheckpoint made(folder / "stretched");
  made.add({model("a")}, at::ones({8}));
  made.add({model("b")}, at::ones({8}));
  made.add({KeyPath{std::string("extra"), std::string("e")}}, at::ones({8}));
  stretch(made.metadata, "model.b", int64_t{1} << 41);
  stretch(made.metadata, "extra.e", int64_t{1} << 40);
  Source source(made.finish());
  for (const std::string& error :
       {error_of([&] { TorchFile(source, {}).write(folder / "out.pt", {}); }), error_of([&] {
          write_safetensors(source, folder / "out", {{"model.b", "b", at::kFloat}}, {}, {});
        })})
    EXPECT_TRUE(has(error, "stretched") && has(error, "model.b")) << error;
  const std::string error = error_of([&] { read_extra(folder / "stretched"); });
  EXPECT_TRUE(has(error, "__0_0.distcp") && has(error, "\"extra.e\"") && has(error, "bytes"))
      << error;
  EXPECT_FALSE(fs::exists(folder / "out.pt") || fs::exists(folder / "out"));
}

TEST(HostileSizes, TensorsCannotUseTheSameBytesAgainAndAgain) {
  Folder folder;
  PythonCheckpoint made(folder / "shared");
  made.add({model("a")}, at::ones({1000}));
  made.add({model("tied")}, at::ones({10}));
  const StoredChunk small = made.metadata.tensors.at("model.tied").chunks[0];
  const StoredChunk large = made.metadata.tensors.at("model.a").chunks[0];
  for (int i = 1; i <= 20; ++i) {  // the large item again, and a part of its own
    const std::string name = "again" + std::to_string(i);
    StoredChunk rest = small;
    rest.rectangle = {{1000 + 10 * (i - 1)}, {10}};
    made.metadata.add_chunk(model(name), at::kFloat, {1000 + 10 * i}, large);
    for (int part = 0; part < i; ++part) {
      rest.rectangle.offsets = {1000 + 10 * part};
      made.metadata.add_chunk(model(name), at::kFloat, {1000 + 10 * i}, rest);
    }
  }
  Source source(made.finish());
  const std::string error = error_of([&] { TorchFile(source, {}).write(folder / "out.pt", {}); });
  EXPECT_TRUE(has(error, "shared: its tensors have") && has(error, "the largest is")) << error;
}

// One text of 60 KB, a thousand times in one value: 60 MB in the new file.
TEST(HostileSizes, APlainValueIsNotCopiedAgainAndAgain) {
  Folder folder;
  PythonCheckpoint made(folder / "repeated");
  made.add({model("a")}, at::ones({8}));
  made.metadata.add_value({std::string("extra"), std::string("v")},
                          write_value(*made.out, [&](pickle::Writer& w) {
                            w.empty_list();
                            w.mark();
                            for (int i = 0; i < 1'000; ++i) w.string(std::string(60'000, 'x'));
                            w.append_all();
                          }));
  Source source(made.finish());
  EXPECT_EQ(TorchFile(source, {}).left_out(), std::vector<std::string>{"extra.v"});
}

TEST(Covers, ATensorCutIntoColumnsIsCheckedInTime) {
  const test::WithDeadline deadline;
  Metadata metadata;
  const auto add = [&](const std::string& name, int64_t parts, int64_t dim) {
    for (int64_t i = 0; i < parts; ++i) {
      Rectangle rectangle{{0, 0}, {parts, parts}};
      rectangle.offsets[static_cast<size_t>(dim)] = i;
      rectangle.sizes[static_cast<size_t>(dim)] = 1;
      metadata.add_chunk({name}, at::kFloat, {parts, parts}, {rectangle, {"__0_0.distcp", 0, 0}});
    }
    return cover_problem(metadata.tensors.at(name));
  };
  EXPECT_EQ(add("rows", 30'000, 0), "");
  EXPECT_EQ(add("columns", 30'000, 1), "");
  // Parts that begin at two places of every dimension can't be told apart by one of them.
  for (int64_t part = 0; part < 1 << 14; ++part) {
    Rectangle rectangle;
    for (int64_t d = 0; d < 14; ++d) {
      rectangle.offsets.push_back(part >> d & 1);
      rectangle.sizes.push_back(1);
    }
    metadata.add_chunk({std::string("cube")}, at::kFloat, std::vector<int64_t>(14, 2),
                       {rectangle, {"__0_0.distcp", 0, 0}});
  }
  const std::string problem = cover_problem(metadata.tensors.at("cube"));
  EXPECT_TRUE(problem.empty() || has(problem, "too long to check")) << problem;
}

TEST(Imports, AreCheckpointsWithAManifest) {
  Folder folder;
  PythonCheckpoint made(folder.path / "from");
  const at::Tensor a = at::randn({4, 3}), none = at::empty({0, 2});
  made.add({model("a")}, a);
  made.add({model("none")}, none);
  Source source(made.finish());
  const fs::path dir = folder.path / "to";
  import_checkpoint(
      source, dir,
      {{"model.a", {"embedding", "head"}, at::kBFloat16}, {"model.none", {"none"}, at::kFloat}},
      {{"step", int64_t{0}}, {"name", std::string("x")}}, nullptr);
  Source back(dir);
  ASSERT_TRUE(back.manifest());
  EXPECT_TRUE(at::equal(back.read_whole("model.head"), a.to(at::kBFloat16)));
  EXPECT_EQ(by_bytes(back, {"model.embedding", "model.head"}).size(), 1u);
  EXPECT_EQ(back.read_whole("model.none").sizes(), none.sizes());
  EXPECT_EQ(std::get<std::string>(read_extra(dir).at("name")), "x");
  EXPECT_EQ(names_in(folder.path), (std::vector<std::string>{"from", "to"}));  // and no "latest"
}

TEST(Imports, LeaveNothingIfTheyFail) {
  Folder folder;
  PythonCheckpoint made(folder.path / "from");
  made.add({model("a")}, at::randn({4, 3}));
  Source source(made.finish());
  const auto stop = [](int64_t) { throw Error("interrupted.", ""); };
  EXPECT_TRUE(has(
      error_of([&] {
        import_checkpoint(source, folder.path / "to", {{"model.a", {"a"}, at::kFloat}}, {}, stop);
      }),
      "interrupted"));
  EXPECT_EQ(names_in(folder.path), std::vector<std::string>{"from"});
}

// --- models ---

template <typename Model, typename Config>
void expect_shapes(const Config& config) {
  Model module(config);
  std::map<std::string, std::vector<int64_t>> expected, found;
  for (const auto& item : module->named_parameters())
    expected[item.key()] = item.value().sizes().vec();
  for (const auto& [name, sizes] : models::parameter_shapes(config)) found[name] = sizes;
  EXPECT_EQ(found, expected);
  EXPECT_TRUE(expected.contains(models::embedding_name(config)));
}

TEST(ParameterShapes, AreThoseOfTheModules) {
  models::LlamaConfig llama{.vocab = 11, .dim = 12, .layers = 2, .heads = 3, .kv_heads = 1};
  expect_shapes<models::Llama>(llama);
  llama.tied = llama.qkv_bias = true;
  llama.head_dim = 6;
  llama.ffn = 20;
  expect_shapes<models::Llama>(llama);
  expect_shapes<models::GPT2>(
      models::GPT2Config{.vocab = 11, .max_tokens = 7, .dim = 12, .layers = 2, .heads = 3});
}

}  // namespace
}  // namespace fsdp::checkpoint
