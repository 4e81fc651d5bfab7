// What the parts of the fake accelerator share: its knobs, its counters, its clock, its allocator and its generator.
#pragma once

#include <ATen/core/Generator.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/Device.h>
#include <c10/core/Storage.h>

#include <atomic>
#include <cstdint>
#include <mutex>
#include <string>

namespace fake {

constexpr auto kDevice = c10::DeviceType::PrivateUse1;

inline c10::Device the_device() {
  return c10::Device(kDevice, 0);
}

// What a device may lack; `fake_lack` takes a set of these.
enum Lack : int { kPeaks = 1, kEvents = 2, kBFloat16 = 4, kHalf = 8, kMemoryInfo = 16, kStatistics = 32 };

struct Knobs {
  std::atomic<bool> present{false};
  std::atomic<bool> lost{false};
  std::atomic<bool> noise{false};
  std::atomic<int> lacking{0};
};
Knobs& knobs();

bool lacks(Lack what);
// Throw NotImplementedError if the device lacks `what`.
void need(Lack what, const char* function);
// Throw AcceleratorError if the device is lost.
void check_alive();

// Count one call of a function of the device.
void count(const std::string& name);
int64_t counted(const std::string& name);

// The host's virtual clock and the device's queue, in nanoseconds. One queue serves all streams.
class Timeline {
 public:
  struct Speed {
    int64_t launch_ns = 500;
    int64_t kernel_ns = 10'000;
    double ns_per_byte = 1.0;
    double ns_per_flop = 0.01;
  };

  // Queue a kernel: the host pays for its launch, the device for its work.
  void launch(int64_t bytes, double flops);
  // Position at which what is queued now will be done.
  int64_t mark();
  // Let the host wait until the device has reached a position.
  void wait(int64_t position);
  void wait_for_all();
  bool reached(int64_t position);
  int64_t now();
  void host_work(int64_t ns);
  void set_speed(const Speed& speed);

 private:
  // What it takes to read the clock, so that no two readings are the same.
  static constexpr int64_t kTick = 100;
  std::mutex mutex_;
  Speed speed_;
  int64_t host_ = 1'000'000'000'000;
  int64_t device_ = 0;
};
Timeline& timeline();

// Memory of the device: the host's, behind the rules of CUDA's caching allocator.
c10::DeviceAllocator& allocator();
// Move a storage into other memory of `size` bytes.
void resize_storage(const c10::Storage& storage, size_t size);

// The generator that kernels draw from when they are given `generator` (or none): a generator of the CPU.
at::Generator host_generator(const std::optional<at::Generator>& generator);
at::Generator make_generator();
const at::Generator& default_generator();

// A number that differs from call to call, for noise; repeatable after `reset_noise`.
uint64_t next_noise();
void reset_noise();

}  // namespace fake
