// Any attributes and datasets as a token shard: refused with a UserError, or what the reader says of it holds together
// and every token can be read.
//
// The file is written by libhdf5 from the input, so what is tried is what our code does with what a shard says. Files
// crafted to attack libhdf5 itself are out of scope.
#include <fuzzer/FuzzedDataProvider.h>

#include <cstdint>
#include <cstdlib>
#include <string>
#include <vector>

#include "data/hdf5_file.h"
#include "data/shards.h"
#include "kernels/check.h"
#include "tests/fuzz/scratch.h"

namespace {

using namespace palimpsest;

void check(bool condition) {
  if (!condition) std::abort();
}

template <class T>
std::vector<T> draw(FuzzedDataProvider& input, size_t count) {
  std::vector<T> values(count);
  for (T& value : values) value = input.ConsumeIntegralInRange<T>(0, 99);
  if (input.ConsumeBool())
    for (T& value : values) value = input.ConsumeIntegral<T>();
  return values;
}

template <class T>
void write(Hdf5File& file, const std::string& name, const std::vector<T>& values, bool matrix) {
  const auto count = static_cast<int64_t>(values.size());
  file.create_dataset(name, Hdf5TypeOf<T>::value, matrix ? std::vector<int64_t>{1, count} : std::vector{count});
  file.write<T>(name, values);
}

// Mostly a good shard; each byte of the input may change one thing of it.
void write_shard(const std::string& path, FuzzedDataProvider& input) {
  Hdf5File file = Hdf5File::create(path);
  const auto num_tokens = input.ConsumeIntegralInRange<size_t>(0, 40);
  std::vector<int64_t> offsets = {0, static_cast<int64_t>(num_tokens)};
  while (input.ConsumeBool() && offsets.size() < 9)
    offsets.insert(offsets.end() - 1, input.ConsumeBool() ? input.ConsumeIntegralInRange<int64_t>(0, 40)
                                                          : input.ConsumeIntegral<int64_t>());
  if (input.ConsumeBool()) offsets.back() = input.ConsumeIntegral<int64_t>();
  const uint8_t layout = input.ConsumeIntegral<uint8_t>();
  if ((layout & 7) == 7) write(file, "tokens", draw<int64_t>(input, num_tokens), false);
  if ((layout & 7) == 6) write(file, "tokens", draw<uint8_t>(input, num_tokens), false);
  if ((layout & 7) >= 3 && (layout & 7) < 6)
    write(file, "tokens", draw<uint32_t>(input, num_tokens), (layout & 64) != 0);
  if ((layout & 7) < 3) write(file, "tokens", draw<uint16_t>(input, num_tokens), (layout & 64) != 0);
  if ((layout & 24) == 24)
    write(file, "doc_offsets", draw<int32_t>(input, offsets.size()), false);
  else if ((layout & 32) == 0 || (layout & 24) != 0)
    write(file, "doc_offsets", offsets, (layout & 128) != 0);

  const auto any_text = [&](size_t most) {
    std::string drawn = input.ConsumeRandomLengthString(most);
    std::erase(drawn, '\0');  // the writer refuses it
    return drawn;
  };
  const auto number = [&](const char* name, int64_t good) {
    const uint8_t choice = input.ConsumeIntegral<uint8_t>();
    if (choice < 240)
      file.set_int("/", name, good);
    else if (choice < 251)
      file.set_int("/", name,
                   choice % 2 == 0 ? input.ConsumeIntegral<int64_t>() : input.ConsumeIntegralInRange(-1, 40));
    else if (choice < 254)
      file.set_string("/", name, any_text(20));
  };
  const auto text = [&](const char* name, const std::string& good) {
    const uint8_t choice = input.ConsumeIntegral<uint8_t>();
    if (choice < 240)
      file.set_string("/", name, good);
    else if (choice < 251)
      file.set_string("/", name, any_text(100));
    else if (choice < 254)
      file.set_int("/", name, input.ConsumeIntegral<int64_t>());
  };
  text("format", "palimpsest tokens");
  number("format_version", 1);
  number("num_tokens", static_cast<int64_t>(num_tokens));
  number("num_documents", static_cast<int64_t>(offsets.size()) - 1);
  number("vocab_size", 100);
  text("tokenizer", "bytes");
  text("tokenizer_hash", "0123456789abcdef");
  number("bos", 1);
  number("eos", 2);
  number("text_bytes", 30);
  number("tokens_crc32", input.ConsumeIntegral<uint32_t>());
  file.close();
}

void read_shard(const std::string& path) {
  ShardReader reader(path);
  const std::vector<int64_t>& offsets = reader.doc_offsets();
  check(reader.num_documents() >= 1 && offsets.front() == 0 && offsets.back() == reader.num_tokens());
  check(reader.vocabulary().size >= 1 && reader.text_bytes() >= 0);
  std::vector<int32_t> tokens(reader.num_tokens());
  reader.read(0, tokens);
  for (const int32_t token : tokens) check(token >= 0 && token < reader.vocabulary().size);
  reader.fingerprint();
  reader.verify();
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static const ScratchFolder folder;
  const std::string path = folder / "shard.h5";
  FuzzedDataProvider input(data, size);
  write_shard(path, input);
  try {
    read_shard(path);
  } catch (const UserError&) {
  }
  return 0;
}
