// A simulated accelerator for tests: torch's PrivateUse1 device, named "sim" by simulator.py. One translation
// unit, whose headers are its sections, in this order; no Python.h: it is loaded with ctypes.
//
// memory.h        Device memory is one memfd mapped twice. Tensors carry addresses of the mapping that faults;
//                 kernels and copies use the other. If the host dereferences device memory, it gets a SIGSEGV.
// streams.h       A stream is a thread with a queue; an event is a point in a queue. Vector clocks say which
//                 work is certain to be over before which.
// accesses.h      The happens-before check of every access, by byte ranges, when it is queued. Its result does
//                 not depend on timing. It also checks that host memory is not unpinned under a copy.
// allocator.h     A caching allocator with one pool per stream. It counts bytes, and fills new memory with NaN.
// torch_device.h  What torch asks of a device: guard, streams, events, hooks, generators.
// kernels.h       Every ATen operation that has a CPU kernel. Shapes come from torch's meta kernels; the CPU's
//                 kernel runs later, on the stream's thread, on the same bytes: so results are the CPU's bits.
//                 The host waits where a shape depends on values, a value goes to the host, or random numbers
//                 are drawn. A queued kernel holds no memory: as on CUDA, only the allocator's order keeps it.
// operators.h     Views, allocations and copies. A copy between pinned host memory and the device that is
//                 contiguous and non_blocking is late and holds nothing; every other copy blocks the host.
//
// No check sees the host's own accesses to host memory. Therefore the target of a download is NaN until the
// copy is over, and the source of an upload is hashed when it is queued and when it has run.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/GeneratorForPrivateuseone.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_cpu_dispatch.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/Allocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <sys/mman.h>
#include <torch/library.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <random>
#include <set>
#include <thread>

namespace sim {
using c10::Device;
using c10::DeviceIndex;
using c10::DeviceType;
using c10::Stream;
using Lock = std::unique_lock<std::mutex>;
using Strings = std::set<std::string>;
}  // namespace sim

#include "memory.h"
#include "streams.h"
#include "accesses.h"
#include "allocator.h"
#include "torch_device.h"
#include "kernels.h"
#include "operators.h"

extern "C" {

// Page-locks host memory: its copies may be late from now on.
void sim_lock(void* p, size_t nbytes) {
  sim::Lock lock(sim::state_mutex);
  sim::accesses.erase((char*)p);
  sim::pinned[(char*)p] = nbytes;
  size_t locked = 0;
  for (auto& [from, length] : sim::pinned) locked += length;
  sim::page_locked_peak = std::max(sim::page_locked_peak, locked);
}

// Undoes sim_lock. If a copy may still use the memory, that is kept as a failure, and the copies are waited
// for: the test is told, and a copy from unmapped memory does not end the process before it can say so.
void sim_unlock(void* p) {
  std::vector<sim::StreamThread*> in_use;
  {
    sim::Lock lock(sim::state_mutex);
    if (sim::is_taken_too_early((char*)p, "unpinned")) in_use = sim::all_streams();
    sim::pinned.erase((char*)p);
  }
  for (auto* stream : in_use) stream->drain();
}

// Sets the delay of late copies and kernels, in microseconds; with `jitter`, a seed, 0 to twice as much; and
// that of every event, which the host sees so much later than the work before it is over.
void sim_delay(int copy_us, int kernel_us, unsigned jitter, int event_us) {
  sim::copy_us = copy_us, sim::kernel_us = kernel_us, sim::jitter = jitter, sim::event_us = event_us;
}

// Says whether a race raises where it is queued, or happens; either way it is kept as a failure.
void sim_strict(int raises) { sim::strict = raises; }

// Writes the counters, in the order of COUNTS in simulator.py.
void sim_counts(long* out) {
  sim::Lock lock(sim::state_mutex);
  sim::settle();
  auto& c = sim::counts;
  long all[] = {c.kernels, c.late_kernels, c.copies, c.late_copies, c.host_waits,
                c.races,   (long)sim::allocated, (long)sim::peak, (long)sim::page_locked_peak};
  std::memcpy(out, all, sizeof all);
}

// Says how often a thread of the host, by its number for the kernel, has waited for the device.
long sim_waits_of(long thread) {
  sim::Lock lock(sim::state_mutex);
  return sim::waits_of[thread];
}

// Forgets failures, counters and the peak.
void sim_restart() {
  sim::Lock lock(sim::state_mutex);
  sim::failure.clear(), sim::counts = {}, sim::peak = sim::allocated, sim::waited.clear(), sim::surprised.clear();
  sim::page_locked_peak = 0, sim::waits_of.clear();
}

// 0: the first failure; 1: the operations that the host waited for; 2: those whose strides differed from
// what their meta kernel said.
const char* sim_text(int which) {
  sim::Lock lock(sim::state_mutex);
  static thread_local std::string text;
  text = which == 0 ? sim::failure : sim::joined(which == 1 ? sim::waited : sim::surprised);
  return text.c_str();
}
}
