// Memory of the fake device: segments of the host's memory, cut into blocks as CUDA's caching allocator cuts them.
#include "fake.h"

#include <c10/core/Allocator.h>
#include <c10/util/Exception.h>

#include <cstdlib>
#include <cstring>
#include <set>
#include <unordered_map>

namespace fake {
namespace {

using c10::CachingAllocator::format_size;
using c10::CachingAllocator::Stat;
using c10::CachingAllocator::StatArray;
using c10::CachingAllocator::StatType;
using c10::CachingDeviceAllocator::DeviceStats;

constexpr size_t kRound = 512;
constexpr size_t kMiB = size_t(1) << 20;
constexpr size_t kCapacity = size_t(16) << 30;

size_t round_up(size_t size, size_t to) {
  return (size + to - 1) / to * to;
}

// CUDA's sizes are multiples of its small segment of 2 MiB; a smaller segment is CUDA in miniature.
struct Sizes {
  size_t small_segment = 2 * kMiB;

  size_t small_block() const {
    return small_segment / 2;
  }
  bool small(size_t size) const {
    return size <= small_block();
  }
  size_t segment(size_t size) const {
    if (small(size))
      return small_segment;
    return size < 5 * small_segment ? 10 * small_segment : round_up(size, small_segment);
  }
  bool splits(size_t size, size_t rest) const {
    return small(size) ? rest >= kRound : rest > small_block();
  }
};

struct Block {
  char* pointer;
  size_t size;
  bool small;
  bool free = true;
  size_t requested = 0;
  Block* before = nullptr;
  Block* after = nullptr;

  bool whole_segment() const {
    return !before && !after;
  }
};

struct BySize {
  bool operator()(const Block* a, const Block* b) const {
    return a->size != b->size ? a->size < b->size : a->pointer < b->pointer;
  }
};

class Allocator final : public c10::DeviceAllocator {
 public:
  // ---- what c10 asks of an allocator

  at::DataPtr allocate(size_t size) override {
    void* pointer = size ? take(size) : nullptr;
    return {pointer, pointer, raw_deleter(), the_device()};
  }
  at::DeleterFnPtr raw_deleter() const override;
  void copy_data(void* to, const void* from, size_t size) const override {
    std::memcpy(to, from, size);
  }

  bool initialized() override {
    return knobs().present && used_;
  }
  void emptyCache(c10::MempoolId_t = {0, 0}) override {
    count("empty_cache");
    timeline().wait_for_all();
    std::lock_guard<std::mutex> lock(mutex_);
    release_cache();
  }
  void recordStream(const at::DataPtr&, c10::Stream) override {}
  DeviceStats getDeviceStats(c10::DeviceIndex) override {
    need(kStatistics, "memory_stats");
    need(kPeaks, "memory_stats");
    count("memory_stats");
    std::lock_guard<std::mutex> lock(mutex_);
    return stats_;
  }
  void resetAccumulatedStats(c10::DeviceIndex) override {
    std::lock_guard<std::mutex> lock(mutex_);
    for_all([](Stat& stat) { stat.reset_accumulated(); });
    stats_.num_alloc_retries = stats_.num_ooms = stats_.num_device_alloc = stats_.num_device_free = 0;
  }
  void resetPeakStats(c10::DeviceIndex) override {
    need(kPeaks, "reset_peak_memory_stats");
    count("reset_peak_memory_stats");
    std::lock_guard<std::mutex> lock(mutex_);
    for_all([](Stat& stat) { stat.reset_peak(); });
  }
  // Not marked as an override: torch 2.11 does not ask for it.
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex) {
    need(kMemoryInfo, "mem_get_info");
    count("mem_get_info");
    std::lock_guard<std::mutex> lock(mutex_);
    return {room(), capacity_};
  }

  // ---- what tests set and read

  void use() {
    used_ = true;
  }
  void set_capacity(size_t bytes) {
    std::lock_guard<std::mutex> lock(mutex_);
    capacity_ = bytes ? bytes : kCapacity;
  }
  void set_others(size_t bytes) {
    std::lock_guard<std::mutex> lock(mutex_);
    others_ = bytes;
  }
  void fail_at(int64_t allocation) {
    std::lock_guard<std::mutex> lock(mutex_);
    until_failure_ = allocation;
  }
  bool set_small_segment(size_t bytes) {
    std::lock_guard<std::mutex> lock(mutex_);
    release_cache();
    if (stats_.reserved_bytes[0].current && bytes != sizes_.small_segment)
      return false;
    sizes_.small_segment = bytes;
    return true;
  }
  void copy_stats(int64_t* to) {
    std::lock_guard<std::mutex> lock(mutex_);
    for_all([&to](Stat& stat) {
      for (int64_t value : {stat.current, stat.peak, stat.allocated, stat.freed})
        *to++ = value;
    });
    for (int64_t value : {stats_.num_alloc_retries, stats_.num_ooms, stats_.num_device_alloc, stats_.num_device_free})
      *to++ = value;
  }
  void copy_room(int64_t* to) {
    std::lock_guard<std::mutex> lock(mutex_);
    to[0] = static_cast<int64_t>(room());
    to[1] = static_cast<int64_t>(capacity_);
  }
  void give_back(void* pointer);

 private:
  using Pool = std::set<Block*, BySize>;

  template <class Change>
  void for_all(Change change) {
    for (StatArray* array :
         {&stats_.allocation, &stats_.segment, &stats_.active, &stats_.inactive_split, &stats_.allocated_bytes,
          &stats_.reserved_bytes, &stats_.active_bytes, &stats_.inactive_split_bytes, &stats_.requested_bytes})
      for (Stat& stat : *array)
        change(stat);
  }
  static void add(StatArray& array, const Block& block, int64_t amount) {
    auto pool = block.small ? StatType::SMALL_POOL : StatType::LARGE_POOL;
    for (auto type : {StatType::AGGREGATE, pool}) {
      Stat& stat = array[static_cast<size_t>(type)];
      amount < 0 ? stat.decrease(-amount) : stat.increase(amount);
    }
  }
  // Enter or leave a free block that is a part of a segment.
  void add_split(const Block& block, int sign) {
    if (block.whole_segment())
      return;
    add(stats_.inactive_split, block, sign);
    add(stats_.inactive_split_bytes, block, sign * static_cast<int64_t>(block.size));
  }
  void add_use(const Block& block, int sign) {
    auto size = sign * static_cast<int64_t>(block.size);
    add(stats_.allocation, block, sign);
    add(stats_.active, block, sign);
    add(stats_.allocated_bytes, block, size);
    add(stats_.active_bytes, block, size);
    add(stats_.requested_bytes, block, sign * static_cast<int64_t>(block.requested));
  }

  Pool& pool_of(bool small) {
    return small ? small_ : large_;
  }
  size_t room() const {
    size_t held = stats_.reserved_bytes[0].current + others_;
    return held < capacity_ ? capacity_ - held : 0;
  }
  void* take(size_t size);
  Block* find(size_t size);
  Block* new_segment(size_t size);
  void split(Block* block, size_t size);
  Block* join(Block* block);
  void release_cache();
  [[noreturn]] void out_of_memory(size_t size, const char* why);

  std::mutex mutex_;
  std::atomic<bool> used_{false};
  Sizes sizes_;
  Pool small_, large_;
  std::unordered_map<void*, Block*> live_;
  DeviceStats stats_;
  size_t capacity_ = kCapacity;
  size_t others_ = 0;
  int64_t until_failure_ = 0;
};

// Never destroyed: tensors may be freed after static objects are.
Allocator& the_allocator() {
  static auto* one = new Allocator();
  return *one;
}

void delete_block(void* pointer) {
  the_allocator().give_back(pointer);
}

at::DeleterFnPtr Allocator::raw_deleter() const {
  return &delete_block;
}

void* Allocator::take(size_t size) {
  TORCH_CHECK(knobs().present, "fake error: no device is present");
  count("allocations");
  std::unique_lock<std::mutex> lock(mutex_);
  used_ = true;
  if (until_failure_ > 0 && --until_failure_ == 0)
    out_of_memory(size, "an injected failure");
  size_t rounded = round_up(size, kRound);
  Block* block = find(rounded);
  if (!block)
    block = new_segment(rounded);
  if (!block) {
    release_cache();
    stats_.num_alloc_retries++;
    block = new_segment(rounded);
  }
  if (!block)
    out_of_memory(size, "the device is full");
  if (sizes_.splits(rounded, block->size - rounded))
    split(block, rounded);
  block->free = false;
  block->requested = size;
  add_use(*block, 1);
  live_[block->pointer] = block;
  auto allocated = stats_.allocated_bytes[0].current, reserved = stats_.reserved_bytes[0].current;
  auto taken = static_cast<int64_t>(block->size);
  void* pointer = block->pointer;
  lock.unlock();
  c10::reportMemoryUsageToProfiler(pointer, taken, allocated, reserved, the_device());
  return pointer;
}

void Allocator::give_back(void* pointer) {
  if (!pointer)
    return;
  std::unique_lock<std::mutex> lock(mutex_);
  auto found = live_.find(pointer);
  if (found == live_.end())
    return;
  Block* block = found->second;
  live_.erase(found);
  add_use(*block, -1);
  auto freed = static_cast<int64_t>(block->size);
  auto allocated = stats_.allocated_bytes[0].current, reserved = stats_.reserved_bytes[0].current;
  block->free = true;
  block = join(block);
  pool_of(block->small).insert(block);
  add_split(*block, 1);
  lock.unlock();
  c10::reportMemoryUsageToProfiler(pointer, -freed, allocated, reserved, the_device());
}

// Take the smallest free block that is large enough out of its pool.
Block* Allocator::find(size_t size) {
  Pool& pool = pool_of(sizes_.small(size));
  Block key{nullptr, size, false};
  auto found = pool.lower_bound(&key);
  if (found == pool.end())
    return nullptr;
  Block* block = *found;
  pool.erase(found);
  add_split(*block, -1);
  return block;
}

Block* Allocator::new_segment(size_t size) {
  size_t bytes = sizes_.segment(size);
  void* memory = bytes <= room() ? std::aligned_alloc(kRound, bytes) : nullptr;
  if (!memory)
    return nullptr;
  auto* block = new Block{static_cast<char*>(memory), bytes, sizes_.small(size)};
  add(stats_.segment, *block, 1);
  add(stats_.reserved_bytes, *block, static_cast<int64_t>(bytes));
  stats_.num_device_alloc++;
  return block;
}

void Allocator::split(Block* block, size_t size) {
  auto* rest = new Block{block->pointer + size, block->size - size, block->small};
  rest->before = block;
  rest->after = block->after;
  if (rest->after)
    rest->after->before = rest;
  block->after = rest;
  block->size = size;
  pool_of(rest->small).insert(rest);
  add_split(*rest, 1);
}

// Join a block that became free with its free neighbours.
Block* Allocator::join(Block* block) {
  if (Block* next = block->after; next && next->free) {
    add_split(*next, -1);
    pool_of(next->small).erase(next);
    block->size += next->size;
    block->after = next->after;
    if (block->after)
      block->after->before = block;
    delete next;
  }
  Block* previous = block->before;
  if (!previous || !previous->free)
    return block;
  add_split(*previous, -1);
  pool_of(previous->small).erase(previous);
  previous->size += block->size;
  previous->after = block->after;
  if (previous->after)
    previous->after->before = previous;
  delete block;
  return previous;
}

void Allocator::release_cache() {
  for (Pool* pool : {&small_, &large_})
    for (auto at = pool->begin(); at != pool->end();) {
      Block* block = *at;
      if (!block->whole_segment()) {
        ++at;
        continue;
      }
      at = pool->erase(at);
      add(stats_.segment, *block, -1);
      add(stats_.reserved_bytes, *block, -static_cast<int64_t>(block->size));
      stats_.num_device_free++;
      std::free(block->pointer);
      delete block;
    }
}

void Allocator::out_of_memory(size_t size, const char* why) {
  stats_.num_ooms++;
  auto allocated = stats_.allocated_bytes[0].current, reserved = stats_.reserved_bytes[0].current;
  c10::reportOutOfMemoryToProfiler(static_cast<int64_t>(size), allocated, reserved, the_device());
  TORCH_CHECK_WITH(
      OutOfMemoryError, false, "fake out of memory (", why, "). Tried to allocate ", format_size(size),
      ". The device has a total capacity of ", format_size(capacity_), " of which ", format_size(room()),
      " is free. ", format_size(allocated), " is allocated by PyTorch, and ", format_size(reserved - allocated),
      " is reserved by PyTorch but unallocated.");
}

const bool registered = [] {
  c10::SetAllocator(kDevice, &the_allocator());
  return true;
}();

}  // namespace

c10::DeviceAllocator& allocator() {
  return the_allocator();
}

}  // namespace fake

extern "C" {
void fake_memory_stats(int64_t* to) {
  fake::count("memory_stats");
  fake::the_allocator().copy_stats(to);
}
void fake_peek_stats(int64_t* to) {
  fake::the_allocator().copy_stats(to);
}
void fake_memory_info(int64_t* to) {
  fake::count("mem_get_info");
  fake::the_allocator().copy_room(to);
}
void fake_peek_info(int64_t* to) {
  fake::the_allocator().copy_room(to);
}
void fake_reset_peaks() {
  fake::the_allocator().resetPeakStats(0);
}
void fake_reset_accumulated() {
  fake::the_allocator().resetAccumulatedStats(0);
}
void fake_empty_cache() {
  fake::the_allocator().emptyCache();
}
void fake_use() {
  fake::the_allocator().use();
}
int fake_initialized() {
  return fake::the_allocator().initialized();
}
void fake_capacity(int64_t bytes) {
  fake::the_allocator().set_capacity(bytes);
}
void fake_others(int64_t bytes) {
  fake::the_allocator().set_others(bytes);
}
void fake_fail_at(int64_t allocation) {
  fake::the_allocator().fail_at(allocation);
}
int fake_small_segment(int64_t bytes) {
  return fake::the_allocator().set_small_segment(bytes);
}
}
