// The kernels against naive loops, over random cases of each: check [cases] [seed] [part] [parts]. Meant for
// -fsanitize=address,undefined: every buffer is exactly as large as it may be, and all bytes that no one may touch
// are compared too. Processes may share the kernels: each takes every `parts`-th, from `part` on.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <numeric>
#include <string>
#include <vector>

#include "emulate.cpp"

namespace {

struct Random {
    uint64_t state;
    uint64_t next() {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        return state * 0x2545f4914f6cdd1dull >> 16;
    }
    uint64_t below(uint64_t bound) { return next() % bound; }
    uint64_t between(uint64_t low, uint64_t high) { return low + below(high - low + 1); }
    template <typename T>
    void shuffle(std::vector<T> &items) {
        for (size_t at = items.size(); at > 1; --at) {
            std::swap(items[at - 1], items[below(at)]);
        }
    }
};

[[noreturn]] void fail(const char *what, uint64_t seed) {
    std::printf("%s differs from the naive loop; seed %llu\n", what, static_cast<unsigned long long>(seed));
    std::exit(1);
}

// Bytes on the heap whose first one has the alignment `width` and, as far as chance wills, no better one.
struct Bytes {
    std::vector<uint8_t> all;
    size_t lead;
    Bytes(Random &random, size_t len, size_t width) : all(), lead(random.below(3) * width) {
        all.resize(lead + len);
        for (size_t at = 0; at < all.size(); at += sizeof(uint32_t)) {
            const uint32_t some = static_cast<uint32_t>(random.next());
            std::memcpy(all.data() + at, &some, std::min(sizeof some, all.size() - at));
        }
        // An allocation is aligned for 16 bytes, and `lead` is a multiple of the width.
    }
    uint8_t *data() { return all.data() + lead; }
    uint64_t address() { return reinterpret_cast<uint64_t>(data()); }
};

// Any shape of launch must do; `depth` is the grid's third axis, which not all kernels have.
void launch(Random &random, const std::string &name, void *params, uint64_t depth) {
    unsigned grid[3], block[3] = {0, 0, 1};
    for (unsigned &size : grid) {
        size = static_cast<unsigned>(random.between(1, 3));
    }
    grid[2] = static_cast<unsigned>(depth);
    block[0] = static_cast<unsigned>(random.between(1, 5));
    block[1] = static_cast<unsigned>(random.between(1, 5));
    void *args[] = {params};
    if (lmc_emulate(name.c_str(), grid, block, args)) {
        std::printf("no kernel %s\n", name.c_str());
        std::exit(1);
    }
}

const size_t WIDTHS[] = {1, 2, 4, 8, 16};

void paged_copy_case(uint64_t seed, size_t width, bool gather, bool table) {
    Random random{seed};
    random.next();
    const bool opaque = random.below(4) == 0;
    const size_t blocks = random.between(1, 6);
    const size_t block_tokens = opaque ? 1 : random.between(1, 5);
    const size_t planes = opaque ? 1 : random.between(1, 2), heads = opaque ? 1 : random.between(1, 4);
    const size_t run_bytes = width * (opaque ? random.between(1, 60) : random.between(1, 9));

    // Strides of the four axes for a random order in memory, with gaps between.
    std::vector<int> order = {0, 1, 2, 3};
    random.shuffle(order);
    const size_t sizes[] = {blocks, planes, heads, block_tokens};
    size_t strides[4], reach = run_bytes, stride = run_bytes;
    for (int axis : order) {
        stride += width * (random.below(3) == 0 ? random.below(3) : 0);
        strides[axis] = stride;
        reach += (sizes[axis] - 1) * stride;
        stride *= sizes[axis];
    }

    const size_t num_layers = random.between(1, 3);
    const size_t first_layer = table ? random.below(2) : 0, moved = table ? num_layers : 1;
    const size_t chunk_tokens = random.between(1, 6), num_tokens = random.between(1, 14);
    const size_t skip = random.below(3) ? random.below(num_tokens + 2) : 0;
    const size_t num_chunks = (num_tokens + chunk_tokens - 1) / chunk_tokens;
    const size_t chunk_layer = random.below(2), chunk_layers = chunk_layer + moved;
    const size_t row = planes * heads * run_bytes;

    // A load may not write a slot twice, so slots that run out are skipped.
    std::vector<int64_t> free(blocks * block_tokens);
    std::iota(free.begin(), free.end(), 0);
    random.shuffle(free);
    std::vector<int64_t> slots(num_tokens, -1);
    for (int64_t &slot : slots) {
        if (random.below(6) == 0) {
            slot = random.below(8) ? -1 : INT64_MIN;
        } else if (!free.empty()) {
            slot = free.back();
            free.pop_back();
        }
    }
    // Far slots and layers: the same bytes under numbers and distances beyond 32 bits.
    const uint64_t far_blocks = random.below(5) == 0 ? (1ull << 33) / block_tokens + random.below(9) : 0;

    const uint64_t far_layers = random.below(5) == 0 ? 3'000'000'000 + random.below(9) : 0;

    std::vector<Bytes> layers, chunks;
    std::vector<uint64_t> layer_table, chunk_table;
    for (size_t layer = 0; layer < first_layer + moved; ++layer) {
        layers.emplace_back(random, reach, width);
        layer_table.push_back(layers.back().address() - far_blocks * strides[0]);
    }
    for (size_t chunk = 0; chunk < num_chunks; ++chunk) {
        const size_t tokens = std::min(chunk_tokens, num_tokens - chunk * chunk_tokens);
        chunks.emplace_back(random, chunk_layers * tokens * row, width);
        chunk_table.push_back(random.below(6) ? chunks.back().address() - far_layers * tokens * row : 0);
    }

    std::vector<Bytes> wanted_layers = layers, wanted_chunks = chunks;
    for (size_t layer = 0; layer < moved; ++layer) {
        for (size_t token = skip; token < num_tokens; ++token) {
            const size_t chunk = token / chunk_tokens, in_chunk = token % chunk_tokens;
            if (slots[token] < 0 || chunk_table[chunk] == 0) {
                continue;
            }
            const size_t tokens = std::min(chunk_tokens, num_tokens - chunk * chunk_tokens);
            const size_t slot = static_cast<size_t>(slots[token]);
            for (size_t plane = 0; plane < planes; ++plane)
            for (size_t head = 0; head < heads; ++head)
            for (size_t byte = 0; byte < run_bytes; ++byte) {
                const size_t paged = slot / block_tokens * strides[0] + slot % block_tokens * strides[3] +
                                     plane * strides[1] + head * strides[2] + byte;
                const size_t stored = (chunk_layer + layer) * tokens * row + in_chunk * row +
                                      (plane * heads + head) * run_bytes + byte;
                if (gather) {
                    wanted_chunks[chunk].data()[stored] = layers[first_layer + layer].data()[paged];
                } else {
                    wanted_layers[first_layer + layer].data()[paged] = chunks[chunk].data()[stored];
                }
            }
        }
    }

    for (int64_t &slot : slots) {
        slot += slot < 0 ? 0 : static_cast<int64_t>(far_blocks * block_tokens);
    }
    lmc_paged_copy copy = {};
    copy.layers = table ? reinterpret_cast<uint64_t>(layer_table.data()) : layer_table[first_layer];
    copy.chunks = reinterpret_cast<uint64_t>(chunk_table.data());
    copy.slots = reinterpret_cast<uint64_t>(slots.data());
    copy.block_stride = strides[0];
    copy.token_stride = strides[3];
    copy.plane_stride = strides[1];
    copy.head_stride = strides[2];
    copy.run_bytes = run_bytes;
    copy.num_tokens = static_cast<uint32_t>(num_tokens);
    copy.chunk_tokens = static_cast<uint32_t>(chunk_tokens);
    copy.skip = static_cast<uint32_t>(skip);
    copy.block_tokens = static_cast<uint32_t>(block_tokens);
    copy.planes = static_cast<uint32_t>(planes);
    copy.heads = static_cast<uint32_t>(heads);
    copy.first_layer = static_cast<uint32_t>(first_layer);
    copy.num_layers = static_cast<uint32_t>(moved);
    copy.chunk_layer = static_cast<uint32_t>(chunk_layer + far_layers);
    const std::string name = std::string(table ? "multi" : "single") + "_layer_kv_transfer_" +
                             (gather ? "gather_" : "scatter_") + std::to_string(width);
    launch(random, name, &copy, random.between(1, 3));
    for (size_t layer = 0; layer < layers.size(); ++layer) {
        if (layers[layer].all != wanted_layers[layer].all) {
            fail("a layer of the cache", seed);
        }
    }
    for (size_t chunk = 0; chunk < num_chunks; ++chunk) {
        if (chunks[chunk].all != wanted_chunks[chunk].all) {
            fail("a chunk", seed);
        }
    }
}

double value_of(uint32_t bits, int kind) {
    return kind == 0 ? Float32::widen(bits)
           : kind == 1 ? Float16::widen(static_cast<uint16_t>(bits))
                       : BFloat16::widen(static_cast<uint16_t>(bits));
}

uint32_t load(const uint8_t *at, size_t element) {
    uint32_t bits = 0;
    std::memcpy(&bits, at, element);
    return bits;
}

void rope_case(uint64_t seed, int kind, size_t width) {
    Random random{seed};
    random.next();
    const size_t element = kind == 0 ? 4 : 2;
    const size_t heads = random.between(1, 3), pairs = random.between(1, 6), beyond = random.below(4);
    const size_t head_stride = (2 * pairs + beyond + random.below(3)) * element;
    const size_t token_stride = heads * head_stride + random.below(3) * element;
    const size_t num_tokens = random.between(1, 6);
    const bool interleaved = random.below(2);
    Bytes keys(random, num_tokens * token_stride, element);
    for (size_t at = 0; at + element <= num_tokens * token_stride; at += element) {
        const float value = static_cast<float>(static_cast<double>(random.below(4001)) / 1000 - 2);
        const uint32_t bits = kind == 0   ? Float32::narrow(value)
                              : kind == 1 ? Float16::narrow(value)
                                          : BFloat16::narrow(value);
        std::memcpy(keys.data() + at, &bits, element);
    }
    std::vector<int64_t> stored, wanted;
    for (size_t token = 0; token < num_tokens; ++token) {
        stored.push_back(random.below(5) ? static_cast<int64_t>(random.below(2'000'000)) : -1);
        wanted.push_back(random.below(4) ? static_cast<int64_t>(random.below(2'000'000)) : stored.back());
    }
    const double PI = 3.14159265358979323846;
    std::vector<double> half_turns, inv_freq;
    for (size_t pair = 0; pair < pairs; ++pair) {
        inv_freq.push_back(std::pow(10000.0, -static_cast<double>(pair) / static_cast<double>(pairs)));
        half_turns.push_back(inv_freq.back() / PI);
    }
    const Bytes before = keys;
    lmc_rope_shift shift = {};
    shift.keys = keys.address();
    shift.stored = reinterpret_cast<uint64_t>(stored.data());
    shift.wanted = reinterpret_cast<uint64_t>(wanted.data());
    shift.half_turns = reinterpret_cast<uint64_t>(half_turns.data());
    shift.token_stride = token_stride;
    shift.head_stride = head_stride;
    shift.num_tokens = static_cast<uint32_t>(num_tokens);
    shift.heads = static_cast<uint32_t>(heads);
    shift.rotary_dim = static_cast<uint32_t>(2 * pairs);
    shift.interleaved = interleaved;
    const char *names[] = {"rope_shift_f32", "rope_shift_f16", "rope_shift_bf16"};
    launch(random, names[kind], &shift, 1);

    Bytes rest = before;
    for (size_t token = 0; token < num_tokens; ++token) {
        const int64_t distance = wanted[token] - stored[token];
        for (size_t head = 0; head < heads && stored[token] >= 0 && distance != 0; ++head)
        for (size_t pair = 0; pair < pairs; ++pair) {
            const size_t first = interleaved ? 2 * pair : pair;
            const size_t second = interleaved ? 2 * pair + 1 : pair + pairs;
            const size_t at = token * token_stride + head * head_stride;
            const size_t ends[] = {at + first * element, at + second * element};
            const uint8_t *old = before.all.data() + before.lead;
            const double x = value_of(load(old + ends[0], element), kind);
            const double y = value_of(load(old + ends[1], element), kind);
            const long double angle = static_cast<long double>(distance) * inv_freq[pair];
            const double expected[] = {static_cast<double>(x * cosl(angle) - y * sinl(angle)),
                                       static_cast<double>(y * cosl(angle) + x * sinl(angle))};
            for (int end = 0; end < 2; ++end) {
                const double found = value_of(load(keys.data() + ends[end], element), kind);
                // Half a unit in the last place of what is stored, and 2^-21 for sine and cosine in 32 bits.
                const double last = kind == 0 ? 0 : std::ldexp(1.0, kind == 1 ? -11 : -8);
                if (std::fabs(found - expected[end]) > 4.0 * std::ldexp(1.0, -21) + last * std::fabs(expected[end])) {
                    fail("a rotated key", seed);
                }
                std::memcpy(rest.data() + ends[end], keys.data() + ends[end], element);
            }
        }
    }
    if (keys.all != rest.all) {
        fail("what is not to be rotated", seed);
    }

    // Its gaps, zeroed.
    const size_t row_bytes = width * random.between(1, 20), stride = row_bytes + width * random.below(3);
    Bytes rows(random, (num_tokens - 1) * stride + row_bytes, width), zeroed = rows;
    for (size_t token = 0; token < num_tokens; ++token) {
        if (stored[token] < 0) {
            std::memset(zeroed.data() + token * stride, 0, row_bytes);
        }
    }
    shift.rows = rows.address();
    shift.row_bytes = row_bytes;
    shift.token_stride = stride;
    launch(random, "zero_gaps_" + std::to_string(width), &shift, 1);
    if (rows.all != zeroed.all) {
        fail("a zeroed row", seed);
    }
}

// 16-bit floats by their definition: all of them to 32 bits, and every midpoint and its neighbours back.
void half_precision() {
    for (uint32_t bits = 0; bits < 0x7c00; ++bits) {
        const int exponent = static_cast<int>(bits >> 10);
        const double fraction = (bits & 0x3ff) / 1024.0;
        const double value = exponent ? std::ldexp(1 + fraction, exponent - 15) : std::ldexp(fraction, -14);
        const float widened = Float16::widen(static_cast<uint16_t>(bits));
        const float above = bits + 1 == 0x7c00 ? 65536.0f : Float16::widen(static_cast<uint16_t>(bits + 1));
        const float midpoint = (widened + above) / 2;
        const bool right = widened == value && Float16::narrow(widened) == bits &&
                           Float16::narrow(-widened) == (bits | 0x8000) &&
                           Float16::narrow(midpoint) == bits + (bits & 1) &&
                           Float16::narrow(std::nextafter(midpoint, 0.0f)) == bits &&
                           Float16::narrow(std::nextafter(midpoint, 1e9f)) == bits + 1;
        if (!right) {
            fail("a 16-bit float", bits);
        }
    }
    for (uint32_t bits = 0; bits < 0x7f80; ++bits) {
        const float value = __uint_as_float(bits << 16), midpoint = __uint_as_float(bits << 16 | 0x8000u);
        const bool right = BFloat16::narrow(value) == bits && BFloat16::narrow(midpoint) == bits + (bits & 1) &&
                           BFloat16::narrow(__uint_as_float(bits << 16 | 0x7fffu)) == bits &&
                           BFloat16::narrow(__uint_as_float(bits << 16 | 0x8001u)) == bits + 1;
        if (!right) {
            fail("a bfloat16", bits);
        }
    }
    const float nan = std::nanf(""), infinity = HUGE_VALF;
    if (!std::isnan(Float16::widen(Float16::narrow(nan))) || Float16::narrow(infinity) != 0x7c00 ||
        Float16::widen(0xfc00) != -infinity || !std::isnan(Float16::widen(0x7c01)) ||
        !std::isnan(BFloat16::widen(BFloat16::narrow(nan)))) {
        fail("an infinity or no number", 0);
    }
}

}  // namespace

int main(int argc, char **argv) {
    const uint64_t cases = argc > 1 ? std::strtoull(argv[1], nullptr, 10) : 100'000;
    const uint64_t seed = argc > 2 ? std::strtoull(argv[2], nullptr, 10) : 1;
    const uint64_t part = argc > 3 ? std::strtoull(argv[3], nullptr, 10) : 0;
    const uint64_t parts = argc > 4 ? std::strtoull(argv[4], nullptr, 10) : 1;
    uint64_t kernel = 0, checked = 0;
    const auto each_case = [&](auto run) {
        if (kernel++ % parts != part) {
            return;
        }
        for (uint64_t at = 0; at < cases; ++at) {
            run(seed + at * 0x9e3779b97f4a7c15ull, at);
        }
        ++checked;
    };
    for (const size_t width : WIDTHS) {
        for (const bool gather : {false, true})
        for (const bool table : {false, true}) {
            each_case([&](uint64_t seed, uint64_t) { paged_copy_case(seed, width, gather, table); });
        }
        // The three that rotate take turns, so that each comes by at least as often as one that zeroes.
        each_case([&](uint64_t seed, uint64_t at) { rope_case(seed, static_cast<int>(at % 3), width); });
    }
    half_precision();
    std::printf("%llu cases of each of %llu\n", static_cast<unsigned long long>(cases),
                static_cast<unsigned long long>(checked));
    return 0;
}
