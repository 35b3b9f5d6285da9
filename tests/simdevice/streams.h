// Streams, events and vector clocks: see device.cpp.
namespace sim {

using Clock = std::map<int, uint64_t>;  // by stream: how many of its accesses come before

std::mutex state_mutex;  // guards clocks, accesses, blocks, counters and the failure
Clock host;              // the accesses that the host has waited for
std::atomic<int> copy_us{0}, kernel_us{0}, event_us{0};
std::atomic<unsigned> jitter{0};
std::atomic<bool> strict{true};
std::string failure;  // the first race, or the first error on a stream's thread
struct Counts {
  long kernels = 0, late_kernels = 0, copies = 0, late_copies = 0, host_waits = 0, races = 0;
} counts;
std::map<long, long> waits_of;  // by a host's thread: how often it waited for the device
Strings waited, surprised;

void merge_into(Clock& mine, const Clock& other) {
  for (auto& [stream, n] : other) mine[stream] = std::max(mine[stream], n);
}

void keep_failure(const std::string& what) {  // under state_mutex
  if (failure.empty()) failure = what;
  ++counts.races;
}

void count_wait() {  // under state_mutex
  ++counts.host_waits;
  ++waits_of[gettid()];
}

class StreamThread {
 public:
  explicit StreamThread(int id) : id(id), _random(id + jitter) { std::thread([this] { run(); }).detach(); }

  void push(std::function<void()> task) {
    Lock lock(_mutex);
    _tasks.push_back(std::move(task));
    ++_queued;
    _changed.notify_all();
  }
  void drain() {  // return when the work queued so far has run
    Lock lock(_mutex);
    auto n = _queued;
    _changed.wait(lock, [&] { return _done >= n; });
  }
  bool idle() {
    Lock lock(_mutex);
    return _done >= _queued;
  }
  void delay(int us) {  // on its own thread
    if (us && jitter) us = std::uniform_int_distribution<int>(0, 2 * us)(_random);
    if (us) std::this_thread::sleep_for(std::chrono::microseconds(us));
  }

  const int id;
  Clock known;  // under state_mutex: what comes before the work that is queued next

 private:
  void run() {
    for (;;) {
      std::function<void()> task;
      {
        Lock lock(_mutex);
        _changed.wait(lock, [&] { return !_tasks.empty(); });
        task = std::move(_tasks.front());
        _tasks.pop_front();
      }
      try {
        task();
      } catch (const std::exception& error) {
        Lock lock(state_mutex);
        keep_failure(std::string("on a stream: ") + error.what());
      }
      task = nullptr;
      Lock lock(_mutex);
      ++_done;
      _changed.notify_all();
    }
  }
  std::mt19937 _random;
  std::mutex _mutex;
  std::condition_variable _changed;
  std::deque<std::function<void()>> _tasks;
  size_t _queued = 0, _done = 0;
};

std::vector<StreamThread*>& all_streams() {  // under state_mutex; the first is the default stream
  static auto* all = new std::vector<StreamThread*>{new StreamThread(0)};
  return *all;
}
thread_local int current = 0;  // the calling thread's stream
StreamThread* stream_of(int id) {
  Lock lock(state_mutex);
  return all_streams().at(id);
}

void wait_on_host(StreamThread* stream) {
  stream->drain();
  Lock lock(state_mutex);
  count_wait();
  merge_into(host, stream->known);
}

struct EventState {  // of one recording of an event
  std::mutex mutex;
  std::condition_variable changed;
  bool over = false;
  Clock known;
  void wait() {
    Lock lock(mutex);
    changed.wait(lock, [this] { return over; });
  }
  bool query() {
    Lock lock(mutex);
    return over;
  }
};
using Event = std::shared_ptr<EventState>;

Event record_event(StreamThread* stream) {
  auto event = std::make_shared<EventState>();
  {
    Lock lock(state_mutex);
    event->known = stream->known;
  }
  stream->push([event] {
    if (event_us) std::this_thread::sleep_for(std::chrono::microseconds(event_us));
    Lock lock(event->mutex);
    event->over = true;
    event->changed.notify_all();
  });
  return event;
}

}  // namespace sim
