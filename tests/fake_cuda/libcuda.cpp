// A CUDA driver over host memory, for tests of what calls one: streams are queues, each with a thread of its own,
// that can be held back or made late; kernels run as loops on the host. It is stricter than a real driver: a copy
// to or from memory it does not know is refused, as is a call without a context.
//
// Built as libcuda.so.1 together with csrc/emulation/emulate.cpp. fake_cuda.h is what tests hold it by.
#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <numeric>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "../../csrc/emulation/emulate.h"
#include "../../csrc/paged_copy.h"
#include "fake_cuda.h"

namespace {

using Code = int;
using Handle = uintptr_t;
using Address = unsigned long long;

enum : Code {
    SUCCESS = 0,
    INVALID_VALUE = 1,
    OUT_OF_MEMORY = 2,
    NOT_INITIALIZED = 3,
    INVALID_DEVICE = 101,
    INVALID_CONTEXT = 201,
    INVALID_HANDLE = 400,
    NOT_FOUND = 500,
    NOT_READY = 600,
    ALREADY_REGISTERED = 712,
    NOT_REGISTERED = 713,
    NOT_SUPPORTED = 801,
};

const Handle CONTEXT = 0xc0de;
const size_t NO_LIMIT = ~size_t{0};

// Work marks an event's recordings by number; a wait remembers the one it is for.
struct Event {
    uint64_t recorded = 0;
    uint64_t done = 0;
    bool timed = false;
    double at_ns = 0;
};

struct Stream {
    std::deque<std::function<void()>> work;
    bool busy = false;
    bool held = false;
    bool ended = false;
    // What its work has taken so far, by the prices.
    double clock_ns = 0;
    std::thread runner;
};

struct Fault {
    int after;
    Code code;
};

struct Price {
    double fixed, a_piece, a_byte;
    double of(size_t pieces, size_t bytes) const {
        return fixed + std::max(a_piece * static_cast<double>(pieces), a_byte * static_cast<double>(bytes));
    }
};

// One lock for all; work itself runs outside it.
struct Driver {
    std::mutex lock;
    std::condition_variable changed;
    bool initialized = false;
    int devices = 1;
    int retained = 0;
    Handle next = 0x1000;
    std::map<Handle, std::shared_ptr<Stream>> streams;
    std::map<Handle, std::shared_ptr<Event>> events;
    std::map<Address, size_t> device_memory, host_memory, adopted;
    bool pageable = false;
    std::set<Handle> modules;
    std::map<Handle, std::string> functions;
    std::map<std::string, long> calls;
    std::map<std::string, Fault> faults;
    std::set<std::string> hidden;
    std::map<std::string, Price> prices;
    size_t register_limit = NO_LIMIT;
    size_t elsewhere = 0;
    unsigned late_us = 0;
    uint64_t random = 1;
    Code sticky = SUCCESS;

    bool is_device(Address at) const {
        auto behind = device_memory.upper_bound(at);
        return behind != device_memory.begin() && at - std::prev(behind)->first < std::prev(behind)->second;
    }

    bool knows(Address at, size_t len) const {
        for (const auto *memory : {&device_memory, &host_memory, &adopted}) {
            auto behind = memory->upper_bound(at);
            if (behind != memory->begin()) {
                const auto &[base, size] = *std::prev(behind);
                if (at - base <= size && len <= size - (at - base)) {
                    return true;
                }
            }
        }
        return false;
    }
};

// Never destroyed: stream threads outlive main.
Driver &driver() {
    static Driver *the = new Driver;
    return *the;
}

thread_local std::vector<Handle> current;
// Of a stream's own thread.
thread_local Stream *running = nullptr;

using Guard = std::unique_lock<std::mutex>;

// Counts a call and answers the fault planted for it.
Code enter(const char *call, bool needs_context = true) {
    Driver &d = driver();
    ++d.calls[call];
    auto planted = d.faults.find(call);
    if (planted != d.faults.end() && planted->second.after-- == 0) {
        const Code code = planted->second.code;
        d.faults.erase(planted);
        return code;
    }
    if (!d.initialized) {
        return NOT_INITIALIZED;
    }
    if (needs_context && (current.empty() || current.back() != CONTEXT || d.retained == 0)) {
        return INVALID_CONTEXT;
    }
    return SUCCESS;
}

void run(const std::shared_ptr<Stream> &stream) {
    Driver &d = driver();
    Guard guard(d.lock);
    running = stream.get();
    for (;;) {
        d.changed.wait(guard, [&] { return (!stream->work.empty() && !stream->held) || stream->ended; });
        if (stream->work.empty()) {
            return;
        }
        auto work = std::move(stream->work.front());
        stream->work.pop_front();
        stream->busy = true;
        d.random = d.random * 6364136223846793005u + 1442695040888963407u;
        const unsigned late = d.late_us ? static_cast<unsigned>(d.random >> 33) % d.late_us : 0;
        guard.unlock();
        if (late) {
            std::this_thread::sleep_for(std::chrono::microseconds(late));
        }
        work();
        guard.lock();
        stream->busy = false;
        d.changed.notify_all();
    }
}

// The stream of a handle; 0, 1 and 2 are the default ones, there from the start.
std::shared_ptr<Stream> stream_of(Handle handle) {
    Driver &d = driver();
    auto found = d.streams.find(handle);
    if (found != d.streams.end()) {
        return found->second;
    }
    if (handle > 2) {
        return nullptr;
    }
    auto stream = std::make_shared<Stream>();
    d.streams[handle] = stream;
    stream->runner = std::thread(run, stream);
    return stream;
}

Code give(Handle handle, std::function<void()> work) {
    auto stream = stream_of(handle);
    if (!stream) {
        return INVALID_HANDLE;
    }
    stream->work.push_back(std::move(work));
    driver().changed.notify_all();
    return SUCCESS;
}

// Work that runs now takes its price. Under the lock.
void charge(const char *way, size_t pieces, size_t bytes) {
    auto price = driver().prices.find(way);
    if (price != driver().prices.end()) {
        running->clock_ns += price->second.of(pieces, bytes);
    }
}

double now_ns() {
    if (!driver().prices.empty()) {
        return running->clock_ns;
    }
    const auto now = std::chrono::steady_clock::now().time_since_epoch();
    return std::chrono::duration<double, std::nano>(now).count();
}

bool idle(const Stream &stream) { return stream.work.empty() && !stream.busy; }

template <typename Map>
Code take(Map &from, typename Map::key_type key, Code missing) {
    return from.erase(key) ? SUCCESS : missing;
}

}  // namespace

#define API extern "C" __attribute__((visibility("default"))) Code
#define ENTER(call, ...)                           \
    Guard guard(driver().lock);                    \
    if (Code code = enter(call, ##__VA_ARGS__)) {  \
        return code;                               \
    }                                              \
    Driver &d = driver();                          \
    (void)d

namespace {

Code fake_init(unsigned) {
    Guard guard(driver().lock);
    driver().initialized = true;
    return enter("cuInit", false);
}

Code fake_driver_version(int *version) {
    ENTER("cuDriverGetVersion", false);
    *version = d.hidden.count("cuMemcpyBatchAsync") ? 12040 : 13000;
    return SUCCESS;
}

Code fake_error_name(Code code, const char **name) {
    static const std::map<Code, const char *> NAMES = {
        {INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE"},
        {OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY"},
        {INVALID_CONTEXT, "CUDA_ERROR_INVALID_CONTEXT"},
        {INVALID_HANDLE, "CUDA_ERROR_INVALID_HANDLE"},
        {200, "CUDA_ERROR_INVALID_IMAGE"},
        {209, "CUDA_ERROR_NO_BINARY_FOR_GPU"},
        {222, "CUDA_ERROR_UNSUPPORTED_PTX_VERSION"},
        {700, "CUDA_ERROR_ILLEGAL_ADDRESS"},
    };
    auto found = NAMES.find(code);
    *name = found == NAMES.end() ? nullptr : found->second;
    return *name ? SUCCESS : INVALID_VALUE;
}

Code fake_error_text(Code code, const char **text) {
    const char *name;
    *text = fake_error_name(code, &name) ? nullptr : "as planted or as found by the fake driver";
    return *text ? SUCCESS : INVALID_VALUE;
}

Code fake_device_count(int *count) {
    ENTER("cuDeviceGetCount", false);
    *count = d.devices;
    return SUCCESS;
}

Code fake_device(int *device, int ordinal) {
    ENTER("cuDeviceGet", false);
    *device = ordinal;
    return ordinal >= 0 && ordinal < d.devices ? SUCCESS : INVALID_DEVICE;
}

Code fake_device_name(char *name, int len, int) {
    ENTER("cuDeviceGetName", false);
    std::strncpy(name, "Fake GPU", static_cast<size_t>(len));
    return SUCCESS;
}

Code fake_device_uuid(unsigned char *uuid, int) {
    ENTER("cuDeviceGetUuid", false);
    for (unsigned char at = 0; at < 16; ++at) {
        uuid[at] = at;
    }
    return SUCCESS;
}

Code fake_device_attribute(int *value, int attribute, int) {
    ENTER("cuDeviceGetAttribute", false);
    *value = attribute == 75 ? 9 : 0;
    return SUCCESS;
}

Code fake_context_retain(Handle *context, int) {
    ENTER("cuDevicePrimaryCtxRetain", false);
    ++d.retained;
    *context = CONTEXT;
    return SUCCESS;
}

Code fake_context_release(int) {
    ENTER("cuDevicePrimaryCtxRelease", false);
    return d.retained-- > 0 ? SUCCESS : INVALID_CONTEXT;
}

Code fake_context_push(Handle context) {
    ENTER("cuCtxPushCurrent", false);
    if (context != CONTEXT) {
        return INVALID_CONTEXT;
    }
    current.push_back(context);
    return SUCCESS;
}

Code fake_context_pop(Handle *context) {
    ENTER("cuCtxPopCurrent");
    *context = current.back();
    current.pop_back();
    return SUCCESS;
}

Code fake_stream_create(Handle *handle, unsigned flags, int) {
    ENTER("cuStreamCreateWithPriority");
    if (flags != 1) {
        return NOT_SUPPORTED;  // A stream that waits for the default one is not imitated.
    }
    *handle = d.next++;
    auto stream = std::make_shared<Stream>();
    d.streams[*handle] = stream;
    stream->runner = std::thread(run, stream);
    return SUCCESS;
}

Code fake_stream_destroy(Handle handle) {
    std::shared_ptr<Stream> stream;
    {
        ENTER("cuStreamDestroy");
        if (handle <= 2 || !d.streams.count(handle)) {
            return INVALID_HANDLE;
        }
        stream = d.streams[handle];
        d.streams.erase(handle);
        stream->ended = true;
        d.changed.notify_all();
    }
    // What is under way comes to its end by itself.
    stream->runner.detach();
    return SUCCESS;
}

Code fake_stream_wait(Handle handle, Handle event, unsigned) {
    ENTER("cuStreamWaitEvent");
    auto found = d.events.find(event);
    if (found == d.events.end()) {
        return INVALID_HANDLE;
    }
    auto marked = found->second;
    const uint64_t number = marked->recorded;
    return give(handle, [marked, number] {
        Guard guard(driver().lock);
        driver().changed.wait(guard, [&] { return marked->done >= number; });
        running->clock_ns = std::max(running->clock_ns, marked->at_ns);
    });
}

Code fake_stream_synchronize(Handle handle) {
    ENTER("cuStreamSynchronize");
    auto stream = stream_of(handle);
    if (!stream) {
        return INVALID_HANDLE;
    }
    d.changed.wait(guard, [&] { return idle(*stream); });
    return d.sticky;
}

Code fake_event_create(Handle *handle, unsigned flags) {
    ENTER("cuEventCreate");
    *handle = d.next++;
    d.events[*handle] = std::make_shared<Event>();
    d.events[*handle]->timed = !(flags & 2);
    return SUCCESS;
}

Code fake_event_destroy(Handle handle) {
    ENTER("cuEventDestroy");
    return take(d.events, handle, INVALID_HANDLE);
}

Code fake_event_record(Handle handle, Handle stream) {
    ENTER("cuEventRecord");
    auto found = d.events.find(handle);
    if (found == d.events.end() || !stream_of(stream)) {
        return INVALID_HANDLE;
    }
    auto event = found->second;
    const uint64_t number = ++event->recorded;
    return give(stream, [event, number] {
        Guard guard(driver().lock);
        event->done = std::max(event->done, number);
        event->at_ns = now_ns();
        driver().changed.notify_all();
    });
}

Code fake_event_query(Handle handle) {
    ENTER("cuEventQuery");
    auto found = d.events.find(handle);
    if (found == d.events.end()) {
        return INVALID_HANDLE;
    }
    return found->second->done < found->second->recorded ? Code{NOT_READY} : d.sticky;
}

Code fake_event_synchronize(Handle handle) {
    ENTER("cuEventSynchronize");
    auto found = d.events.find(handle);
    if (found == d.events.end()) {
        return INVALID_HANDLE;
    }
    auto event = found->second;
    const uint64_t number = event->recorded;
    d.changed.wait(guard, [&] { return event->done >= number; });
    return d.sticky;
}

Code fake_event_elapsed(float *milliseconds, Handle from, Handle to) {
    ENTER("cuEventElapsedTime");
    auto begin = d.events.find(from), end = d.events.find(to);
    if (begin == d.events.end() || end == d.events.end() || !begin->second->timed || !end->second->timed) {
        return INVALID_HANDLE;
    }
    for (const auto &event : {begin->second, end->second}) {
        if (event->recorded == 0 || event->done < event->recorded) {
            return event->recorded ? Code{NOT_READY} : Code{INVALID_HANDLE};
        }
    }
    *milliseconds = static_cast<float>((end->second->at_ns - begin->second->at_ns) / 1e6);
    return d.sticky;
}

Code fake_host_register(void *base, size_t len, unsigned flags) {
    ENTER("cuMemHostRegister");
    if (len > d.register_limit || flags != 3) {
        return OUT_OF_MEMORY;
    }
    const Address at = reinterpret_cast<Address>(base);
    auto behind = d.host_memory.lower_bound(at);
    const bool into_next = behind != d.host_memory.end() && behind->first < at + len;
    const bool from_before = behind != d.host_memory.begin() &&
                             std::prev(behind)->first + std::prev(behind)->second > at;
    if (into_next || from_before) {
        return ALREADY_REGISTERED;
    }
    d.host_memory[at] = len;
    return SUCCESS;
}

Code fake_host_unregister(void *base) {
    ENTER("cuMemHostUnregister");
    return take(d.host_memory, reinterpret_cast<Address>(base), NOT_REGISTERED);
}

Code fake_host_device_address(Address *device, void *host, unsigned) {
    ENTER("cuMemHostGetDevicePointer");
    *device = reinterpret_cast<Address>(host) + d.elsewhere;
    return d.host_memory.count(reinterpret_cast<Address>(host)) ? SUCCESS : INVALID_VALUE;
}

Code fake_allocate(Address *address, size_t len) {
    ENTER("cuMemAlloc");
    void *memory = len ? std::aligned_alloc(256, (len + 255) / 256 * 256) : nullptr;
    if (!memory) {
        return len ? OUT_OF_MEMORY : INVALID_VALUE;
    }
    *address = reinterpret_cast<Address>(memory);
    d.device_memory[*address] = len;
    return SUCCESS;
}

Code fake_free(Address address) {
    ENTER("cuMemFree");
    // As a driver does: not before everything given to the device is done.
    d.changed.wait(guard, [&] {
        return std::all_of(d.streams.begin(), d.streams.end(), [](auto &entry) { return idle(*entry.second); });
    });
    if (Code code = take(d.device_memory, address, INVALID_VALUE)) {
        return code;
    }
    std::free(reinterpret_cast<void *>(address));
    return SUCCESS;
}

Code fake_copy(Address to, Address from, size_t len, Handle stream) {
    ENTER("cuMemcpyAsync");
    if (!d.pageable && (!d.knows(to, len) || !d.knows(from, len))) {
        return INVALID_VALUE;
    }
    return give(stream, [=] {
        std::memmove(reinterpret_cast<void *>(to), reinterpret_cast<void *>(from), len);
        Guard guard(driver().lock);
        charge("single", 1, len);
    });
}

struct CopyAttributes {
    int source_order;
    int source_hint[2], target_hint[2];
    unsigned flags;
};

Code fake_copy_batch(Address *to, Address *from, size_t *lens, size_t count, CopyAttributes *attributes,
                     size_t *first, size_t num_attributes, size_t *failed, Handle stream) {
    ENTER("cuMemcpyBatchAsync");
    *failed = NO_LIMIT;
    const bool ordered = num_attributes == 1 && first[0] == 0 && attributes[0].source_order == 1;
    // A real driver refuses the legacy default stream here.
    if (!count || !ordered || stream == 0) {
        return INVALID_VALUE;
    }
    std::vector<std::pair<Address, Address>> ends;
    std::vector<size_t> sizes(lens, lens + count);
    for (size_t at = 0; at < count; ++at) {
        const bool known = d.pageable || (d.knows(to[at], lens[at]) && d.knows(from[at], lens[at]));
        if (!known || lens[at] == 0) {
            *failed = at;
            return INVALID_VALUE;
        }
        ends.emplace_back(to[at], from[at]);
    }
    return give(stream, [ends, sizes] {
        // No order among the copies of a batch: last first.
        for (size_t at = ends.size(); at-- > 0;) {
            std::memmove(reinterpret_cast<void *>(ends[at].first), reinterpret_cast<void *>(ends[at].second), sizes[at]);
        }
        Guard guard(driver().lock);
        charge("batch", sizes.size(), std::accumulate(sizes.begin(), sizes.end(), size_t{0}));
    });
}

Code fake_fill(Address address, unsigned char value, size_t len, Handle stream) {
    ENTER("cuMemsetD8Async");
    if (!d.knows(address, len)) {
        return INVALID_VALUE;
    }
    return give(stream, [=] { std::memset(reinterpret_cast<void *>(address), value, len); });
}

Code fake_module_load(Handle *module, const void *image) {
    ENTER("cuModuleLoadData");
    if (!image) {
        return INVALID_VALUE;
    }
    *module = d.next++;
    d.modules.insert(*module);
    return SUCCESS;
}

Code fake_module_unload(Handle module) {
    ENTER("cuModuleUnload");
    return d.modules.erase(module) ? SUCCESS : INVALID_HANDLE;
}

Code fake_module_function(Handle *function, Handle module, const char *name) {
    ENTER("cuModuleGetFunction");
    if (!d.modules.count(module)) {
        return INVALID_HANDLE;
    }
    if (!lmc_param_bytes(name)) {
        return NOT_FOUND;
    }
    *function = d.next++;
    d.functions[*function] = name;
    return SUCCESS;
}

Code fake_launch(Handle function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                 unsigned block_y, unsigned block_z, unsigned shared, Handle stream, void **params, void **extra) {
    ENTER("cuLaunchKernel");
    auto found = d.functions.find(function);
    if (found == d.functions.end()) {
        return INVALID_HANDLE;
    }
    const std::string name = found->second;
    // Parameters are copied now, memory is read when the stream comes to it.
    std::vector<char> copied(lmc_param_bytes(name.c_str()));
    std::memcpy(copied.data(), params[0], copied.size());
    if (name.find("kv_transfer") != std::string::npos) {
        lmc_paged_copy copy;
        std::memcpy(&copy, copied.data(), sizeof copy);
        if (!d.knows(copy.layers, 8) || !d.knows(copy.chunks, 8) || !d.knows(copy.slots, 8ull * copy.num_tokens)) {
            return 700;
        }
    }
    if (shared || extra) {
        return INVALID_VALUE;
    }
    const bool is_copy = name.find("kv_transfer") != std::string::npos;
    return give(stream, [=]() mutable {
        if (is_copy) {
            // Where the chunks are is known when the stream comes to the table.
            lmc_paged_copy copy;
            std::memcpy(&copy, copied.data(), sizeof copy);
            const auto *chunks = reinterpret_cast<const uint64_t *>(copy.chunks);
            const uint64_t count = copy.chunk_tokens ? (copy.num_tokens + copy.chunk_tokens - 1) / copy.chunk_tokens : 0;
            Guard guard(driver().lock);
            for (uint64_t at = 0; at < count; ++at) {
                if (chunks[at] && !driver().knows(chunks[at], 1)) {
                    driver().sticky = 700;
                    return;
                }
            }
        }
        const unsigned grid[] = {grid_x, grid_y, grid_z}, block[] = {block_x, block_y, block_z};
        void *one[] = {copied.data()};
        if (lmc_emulate(name.c_str(), grid, block, one)) {
            Guard guard(driver().lock);
            driver().sticky = INVALID_VALUE;
            return;
        }
        if (name.find("kv_transfer") != std::string::npos) {
            lmc_paged_copy copy;
            std::memcpy(&copy, copied.data(), sizeof copy);
            const size_t pieces = static_cast<size_t>(copy.num_tokens) * copy.planes * copy.heads * copy.num_layers;
            const Address first = *reinterpret_cast<const uint64_t *>(copy.chunks);
            Guard guard(driver().lock);
            const bool device = driver().is_device(first);
            charge(device ? "device" : "direct", pieces, pieces * copy.run_bytes);
        }
    });
}

struct Entry {
    const char *name;
    int since;
    void *function;
};

#define ENTRY(name, since, function) {name, since, reinterpret_cast<void *>(function)}
const Entry ENTRIES[] = {
    ENTRY("cuInit", 2000, fake_init),
    ENTRY("cuDriverGetVersion", 2020, fake_driver_version),
    ENTRY("cuGetErrorName", 6000, fake_error_name),
    ENTRY("cuGetErrorString", 6000, fake_error_text),
    ENTRY("cuDeviceGetCount", 2000, fake_device_count),
    ENTRY("cuDeviceGet", 2000, fake_device),
    ENTRY("cuDeviceGetName", 2000, fake_device_name),
    ENTRY("cuDeviceGetUuid", 11040, fake_device_uuid),
    ENTRY("cuDeviceGetAttribute", 2000, fake_device_attribute),
    ENTRY("cuDevicePrimaryCtxRetain", 7000, fake_context_retain),
    ENTRY("cuDevicePrimaryCtxRelease", 11000, fake_context_release),
    ENTRY("cuCtxPushCurrent", 4000, fake_context_push),
    ENTRY("cuCtxPopCurrent", 4000, fake_context_pop),
    ENTRY("cuStreamCreateWithPriority", 5050, fake_stream_create),
    ENTRY("cuStreamDestroy", 4000, fake_stream_destroy),
    ENTRY("cuStreamWaitEvent", 3020, fake_stream_wait),
    ENTRY("cuStreamSynchronize", 2000, fake_stream_synchronize),
    ENTRY("cuEventCreate", 2000, fake_event_create),
    ENTRY("cuEventDestroy", 4000, fake_event_destroy),
    ENTRY("cuEventRecord", 2000, fake_event_record),
    ENTRY("cuEventQuery", 2000, fake_event_query),
    ENTRY("cuEventElapsedTime", 2000, fake_event_elapsed),
    ENTRY("cuEventSynchronize", 2000, fake_event_synchronize),
    ENTRY("cuMemHostRegister", 6050, fake_host_register),
    ENTRY("cuMemHostUnregister", 4000, fake_host_unregister),
    ENTRY("cuMemHostGetDevicePointer", 3020, fake_host_device_address),
    ENTRY("cuMemAlloc", 3020, fake_allocate),
    ENTRY("cuMemFree", 3020, fake_free),
    ENTRY("cuMemcpyAsync", 4000, fake_copy),
    ENTRY("cuMemcpyBatchAsync", 12080, fake_copy_batch),
    ENTRY("cuMemsetD8Async", 3020, fake_fill),
    ENTRY("cuModuleLoadData", 2000, fake_module_load),
    ENTRY("cuModuleUnload", 2000, fake_module_unload),
    ENTRY("cuModuleGetFunction", 2000, fake_module_function),
    ENTRY("cuLaunchKernel", 4000, fake_launch),
};

}  // namespace

#ifndef FAKE_CUDA_WITHOUT_GET_PROC_ADDRESS
// Per-thread default streams were asked for: not imitated.
API cuGetProcAddress_v2(const char *symbol, void **function, int release, unsigned long long flags, int *status) {
    *function = nullptr;
    *status = 1;
    if (flags != 1) {
        return NOT_SUPPORTED;
    }
    for (const Entry &entry : ENTRIES) {
        if (std::strcmp(entry.name, symbol) == 0 && !driver().hidden.count(symbol)) {
            *status = entry.since <= release ? 0 : 2;
            *function = *status ? nullptr : entry.function;
        }
    }
    return SUCCESS;
}
#endif

#define CONTROL extern "C" __attribute__((visibility("default")))

CONTROL void fake_cuda_hide(const char *symbol) { driver().hidden.insert(symbol); }

CONTROL void fake_cuda_fail(const char *call, int after, int code) {
    Guard guard(driver().lock);
    driver().faults[call] = {after, code};
}

CONTROL void fake_cuda_break(int code) {
    Guard guard(driver().lock);
    driver().sticky = code;
}

CONTROL void fake_cuda_be_late(unsigned most_us, unsigned long long seed) {
    Guard guard(driver().lock);
    driver().late_us = most_us;
    driver().random = seed;
}

CONTROL void fake_cuda_hold(uintptr_t stream, int held) {
    Guard guard(driver().lock);
    if (auto found = stream_of(stream)) {
        found->held = held != 0;
        driver().changed.notify_all();
    }
}

CONTROL void fake_cuda_limit_registration(size_t len) { driver().register_limit = len; }

CONTROL void fake_cuda_price(const char *way, double fixed, double a_piece, double a_byte) {
    Guard guard(driver().lock);
    driver().prices[way] = {fixed, a_piece, a_byte};
}

CONTROL void fake_cuda_map_elsewhere(size_t distance) { driver().elsewhere = distance; }


CONTROL void fake_cuda_adopt(void *base, size_t len) {
    Driver &d = driver();
    Guard guard(d.lock);
    const Address at = reinterpret_cast<Address>(base);
    for (auto memory = d.adopted.begin(); memory != d.adopted.end();) {
        const bool overlaps = memory->first < at + len && at < memory->first + memory->second;
        memory = overlaps ? d.adopted.erase(memory) : std::next(memory);
    }
    d.adopted[at] = len;
}

CONTROL void fake_cuda_disown() {
    Guard guard(driver().lock);
    driver().adopted.clear();
}

CONTROL void fake_cuda_allow_pageable(int allowed) {
    Guard guard(driver().lock);
    driver().pageable = allowed != 0;
}

CONTROL int fake_cuda_engine_copy(void *to, const void *from, size_t len, unsigned late_us, uintptr_t stream) {
    Guard guard(driver().lock);
    return give(stream, [=] {
        std::this_thread::sleep_for(std::chrono::microseconds(late_us));
        std::memmove(to, from, len);
    });
}

CONTROL void fake_cuda_drain(uintptr_t stream) {
    Driver &d = driver();
    Guard guard(d.lock);
    if (auto found = stream_of(stream)) {
        d.changed.wait(guard, [&] { return idle(*found); });
    }
}

CONTROL long fake_cuda_calls(const char *call) {
    Guard guard(driver().lock);
    return driver().calls[call];
}

CONTROL long fake_cuda_live() {
    Driver &d = driver();
    Guard guard(d.lock);
    const auto ours = std::count_if(d.streams.begin(), d.streams.end(), [](auto &entry) { return entry.first > 2; });
    return static_cast<long>(d.events.size() + d.device_memory.size() + d.host_memory.size() + d.modules.size()) +
           static_cast<long>(ours) + d.retained;
}

CONTROL long fake_cuda_depth() { return static_cast<long>(current.size()); }
