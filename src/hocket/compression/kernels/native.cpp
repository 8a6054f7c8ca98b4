// The codes on a CPU: one pass over the values where the torch text of a code has many. Reference: the files of these names.
//
// Every function takes rows of values, each row at its stride, and works on portions of rows in `threads` threads. What it computes
// of a row depends on that row alone. Sums of a block have one order whatever the processor: 16 partial sums, then these in pairs.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <thread>
#include <vector>

namespace {

using i64 = int64_t;
using u8 = uint8_t;
using u32 = uint32_t;
using u64 = uint64_t;

constexpr float TINY = 1.17549435e-38f;
constexpr i64 TILE = 8192;  // values that a thread has in its first cache at a time, and the largest block

// Calls work(row, first, end) for portions of all rows: multiples of `multiple` values, none below 2¹⁷ for a thread of its own.
template <typename Work>
void shared(i64 rows, i64 size, i64 multiple, i64 threads, Work work) {
    threads = std::max<i64>(1, std::min(threads, rows * size >> 17));
    i64 tiles = (size + multiple - 1) / multiple, all = rows * tiles;
    auto some = [&](i64 thread) {
        i64 at = all * thread / threads, last = all * (thread + 1) / threads;
        while (at < last) {
            i64 row = at / tiles, first = at % tiles, end = std::min(tiles, first + last - at);
            work(row, first * multiple, std::min(size, end * multiple));
            at += end - first;
        }
    };
    std::vector<std::thread> others;
    for (i64 k = 1; k < threads; k++) others.emplace_back(some, k);
    some(0);
    for (auto& other : others) other.join();
}

inline float as_float(u32 bits) { float x; std::memcpy(&x, &bits, 4); return x; }
inline u32 as_bits(float x) { u32 bits; std::memcpy(&bits, &x, 4); return bits; }
inline u32 magnitude(float x) { return as_bits(x) & 0x7fffffffu; }

// hocket.noise.bits
inline u32 noise(u32 key, u32 index) {
    u32 x = index ^ key, added = key * 0x9E3779B1u;
    for (int round = 0; round < 2; round++) {
        x ^= x >> 16;
        x *= 0x7FEB352Du;
        x ^= x >> 15;
        x *= 0x846CA68Bu;
        x ^= x >> 16;
        x += added;
    }
    return x;
}

inline float uniform(u32 key, u32 index) { return (float)(int32_t)(noise(key, index) >> 8) * 5.9604644775390625e-8f; }

inline float peak(const float* x, i64 n) {
    u32 most = 0;
    for (i64 i = 0; i < n; i++) most = std::max(most, magnitude(x[i]));
    return as_float(most);
}

typedef float Floats __attribute__((vector_size(64)));
typedef int32_t Ints __attribute__((vector_size(64)));

inline Floats where(Ints mask, Floats x) { return (Floats)(mask & (Ints)x); }  // zero elsewhere

// The sum of value(x), where value(0) is 0.
template <typename Value>
inline float total(const float* x, i64 n, Value value) {
    Floats sums = {}, some = {};
    i64 i = 0;
    for (; i + 16 <= n; i += 16) {
        std::memcpy(&some, x + i, 64);
        sums += value(some);
    }
    some = Floats{};
    std::memcpy(&some, x + i, (n - i) * 4);
    sums += value(some);
    for (int half = 8; half; half /= 2)
        for (int k = 0; k < half; k++) sums[k] += sums[k + half];
    return sums[0];
}

// hocket.compression.bitpack.pack of n codes; those behind them, up to a whole group of eight, are set to zero.
void pack(u8* __restrict codes, i64 n, int bits, u8* __restrict out) {
    if (bits == 8) { std::memcpy(out, codes, n); return; }
    std::memset(codes + n, 0, -n & 7);
    if (bits == 4) {
        for (i64 i = 0; i < (n + 1) / 2; i++) {
            uint16_t w; std::memcpy(&w, codes + 2 * i, 2);
            out[i] = (u8)(w | w >> 4);
        }
    } else if (bits == 2) {
        for (i64 i = 0; i < (n + 3) / 4; i++) {
            u32 w; std::memcpy(&w, codes + 4 * i, 4);
            out[i] = (u8)(w | w >> 6 | w >> 12 | w >> 18);
        }
    } else {
        for (int b = 0; b < bits; b++)
            for (i64 i = 0; i < (n + 7) / 8; i++) {
                u64 w; std::memcpy(&w, codes + 8 * i, 8);
                w = w >> b & 0x0101010101010101ull;
                w |= w >> 7; w |= w >> 14; w |= w >> 28;
                out[i * bits + b] = (u8)w;
            }
    }
}

// The inverse; it writes whole groups of eight codes.
void unpack(const u8* __restrict packed, i64 n, int bits, u8* __restrict codes) {
    if (bits == 8) { std::memcpy(codes, packed, n); return; }
    if (bits == 4) {
        for (i64 i = 0; i < (n + 1) / 2; i++) {
            uint16_t w = packed[i];
            w = (uint16_t)((w | w << 4) & 0x0f0f);
            std::memcpy(codes + 2 * i, &w, 2);
        }
    } else if (bits == 2) {
        for (i64 i = 0; i < (n + 3) / 4; i++) {
            u32 w = packed[i];
            w = (w | w << 6 | w << 12 | w << 18) & 0x03030303u;
            std::memcpy(codes + 4 * i, &w, 4);
        }
    } else {
        for (i64 i = 0; i < (n + 7) / 8; i++) {
            u64 found = 0;
            for (int b = 0; b < bits; b++) {
                u64 w = packed[i * bits + b];
                w |= w << 28; w |= w << 14; w |= w << 7;
                found |= (w & 0x0101010101010101ull) << b;
            }
            std::memcpy(codes + 8 * i, &found, 8);
        }
    }
}

inline i64 packed_size(i64 n, int bits) { return 8 % bits == 0 ? (n * bits + 7) / 8 : (n + 7) / 8 * bits; }

// Encodes rows in blocks: scales(block's values, how many, its number, its codes, where its scales are), then codes are packed.
template <typename Encode>
void encode_blocks(const float* rows, i64 count, i64 size, i64 stride, i64 block, int bits, int scales, float* scale, u8* packed,
                   i64 threads, Encode encode) {
    i64 blocks = (size + block - 1) / block, bytes = packed_size(size, bits);
    shared(count, size, TILE, threads, [&](i64 row, i64 first, i64 end) {
        alignas(64) u8 codes[TILE + 8];
        for (i64 at = first; at < end; at += TILE) {
            i64 n = std::min(TILE, end - at);
            for (i64 i = 0; i < n; i += block) {
                i64 number = (at + i) / block;
                encode(row, rows + row * stride + at + i, at + i, std::min(block, n - i), codes + i,
                       scale + (row * blocks + number) * scales);
            }
            pack(codes, n, bits, packed + row * bytes + packed_size(at, bits));
        }
    });
}

template <typename Decode>
void decode_blocks(const float* scale, i64 scale_stride, const u8* packed, i64 packed_stride, i64 count, i64 size, i64 block,
                   int bits, int scales, float* out, i64 threads, Decode decode) {
    shared(count, size, TILE, threads, [&](i64 row, i64 first, i64 end) {
        alignas(64) u8 codes[TILE + 8];
        for (i64 at = first; at < end; at += TILE) {
            i64 n = std::min(TILE, end - at);
            unpack(packed + row * packed_stride + packed_size(at, bits), n, bits, codes);
            for (i64 i = 0; i < n; i += block)
                decode(codes + i, std::min(block, n - i), scale + row * scale_stride + (at + i) / block * scales,
                       out + row * size + at + i);
        }
    });
}

// --- values between others ---------------------------------------------------------------------------------------------------

// Bit i is set where the magnitude of x[i] is at least `least` (n ≤ 64).
inline u64 marks(const float* x, i64 n, u32 least) {
    alignas(64) u8 above[64];
    if (n < 64) {
        std::memset(above, 0, 64);
        for (i64 i = 0; i < n; i++) above[i] = magnitude(x[i]) >= least;
    } else {
        for (int i = 0; i < 64; i++) above[i] = (int32_t)magnitude(x[i]) >= (int32_t)least;
    }
    u64 found = 0;
    for (int k = 0; k < 8; k++) {
        u64 w; std::memcpy(&w, above + 8 * k, 8);
        w |= w >> 7; w |= w >> 14; w |= w >> 28;
        found |= (w & 255) << (8 * k);
    }
    return found;
}

inline i64 count_from(const float* x, i64 n, u32 least) {
    i64 found = 0;
    for (i64 at = 0; at < n; at += 1 << 16) {
        int32_t some = 0;
        for (i64 i = at; i < std::min(n, at + (1 << 16)); i++) some += (int32_t)magnitude(x[i]) >= (int32_t)least;
        found += some;
    }
    return found;
}

// Calls take(i) for every x[i] of at least this magnitude, in order.
template <typename Take>
inline void each_from(const float* x, i64 n, u32 least, Take take) {
    for (i64 at = 0; at < n; at += 64)
        for (u64 m = marks(x + at, std::min<i64>(64, n - at), least); m; m &= m - 1) take(at + __builtin_ctzll(m));
}

struct Edge { u32 level; i64 equal; };  // the k-th largest magnitude, and how many of those equal to it are among the k largest

// Of n values (their magnitudes are changed in order).
Edge kth(u32* magnitudes, i64 n, i64 k) {
    std::nth_element(magnitudes, magnitudes + k - 1, magnitudes + n, std::greater<u32>());
    u32 level = magnitudes[k - 1];
    i64 equal = 1;
    for (i64 i = 0; i < k - 1; i++) equal += magnitudes[i] == level;
    return {level, equal};
}

struct Found { std::vector<u32> indices, magnitudes, some; };

void gather(const float* x, i64 n, u32 least, Found& found) {
    found.indices.clear();
    found.magnitudes.clear();
    each_from(x, n, least, [&](i64 i) { found.indices.push_back((u32)i); found.magnitudes.push_back(magnitude(x[i])); });
}

// Of a chunk: from a magnitude `guess` up or down, in ever longer steps and then in halves, until not many more than k reach it.
Edge kth_of_chunk(const float* x, i64 n, i64 k, u32 guess, Found& found) {
    i64 low = 0, high = 0x80000000, step = 1 << 20;  // at least k values reach low, fewer reach high
    for (i64 least = guess; high - low > 1; step *= 2) {
        i64 count = count_from(x, n, (u32)least);
        (count >= k ? low : high) = least;
        if (count >= k && count <= k + k / 2 + 8) break;
        i64 next = count >= k ? low + step : high - step;
        least = next > low && next < high ? next : low + (high - low) / 2;
    }
    gather(x, n, (u32)low, found);
    found.some = found.magnitudes;
    return kth(found.some.data(), found.some.size(), k);
}

// A magnitude that, by a sample, some more than k values reach.
u32 sampled(const float* x, i64 n, i64 k, Found& found) {
    constexpr i64 SAMPLE = 1 << 14;
    found.some.resize(SAMPLE);
    i64 step = n / SAMPLE;
    for (i64 i = 0; i < SAMPLE; i++) found.some[i] = magnitude(x[i * step]);
    double expected = (double)k * SAMPLE / n;
    i64 rank = std::min<i64>(SAMPLE - 1, (i64)(expected + 4 * std::sqrt(expected) + 8));
    std::nth_element(found.some.begin(), found.some.begin() + rank, found.some.end(), std::greater<u32>());
    return found.some[rank];
}

Edge kth_of_row(const float* x, i64 n, i64 k, u32 guess, Found& found) {
    if (n < 1 << 17 || k > n / 4) return kth_of_chunk(x, n, k, guess, found);
    gather(x, n, sampled(x, n, k, found), found);
    if ((i64)found.indices.size() < k) gather(x, n, 0, found);  // the sample has erred
    found.some = found.magnitudes;
    return kth(found.some.data(), found.some.size(), k);
}

// Indices of the k largest, in order; of equal ones the first.
template <typename Put>
void chosen(const Found& found, Edge edge, Put put) {
    i64 left = edge.equal;
    for (size_t i = 0; i < found.indices.size(); i++) {
        u32 m = found.magnitudes[i];
        if (m > edge.level || (m == edge.level && left-- > 0)) put(found.indices[i]);
    }
}

}  // namespace

extern "C" {

void hocket_qsgd(const float* rows, i64 count, i64 size, i64 stride, const i64* keys, i64 block, i64 bits, float* norms, u8* packed,
                 i64 threads) {
    const float levels = (float)((1 << (bits - 1)) - 1);
    encode_blocks(rows, count, size, stride, block, (int)bits, 1, norms, packed, threads,
                  [=](i64 row, const float* __restrict x, i64 first, i64 n, u8* __restrict codes, float* scale) {
        float norm = peak(x, n), divisor = norm < TINY ? TINY : norm;
        u32 key = (u32)keys[row], index = (u32)first;
        *scale = norm;
        for (i64 i = 0; i < n; i++) {
            float code = std::floor(uniform(key, index + (u32)i) + x[i] / divisor * levels);
            code = code < -levels ? -levels : code;
            code = code > levels ? levels : code;
            codes[i] = (u8)((int32_t)(code + levels));
        }
        if (!(norm <= 3.4028235e38f)) std::memset(codes, (int)levels, n);  // not a number: codes that stay within their bits
    });
}

void hocket_qsgd_decode(const float* norms, i64 norm_stride, const u8* packed, i64 packed_stride, i64 count, i64 size, i64 block,
                        i64 bits, float* out, i64 threads) {
    const float levels = (float)((1 << (bits - 1)) - 1);
    decode_blocks(norms, norm_stride, packed, packed_stride, count, size, block, (int)bits, 1, out, threads,
                  [=](const u8* __restrict codes, i64 n, const float* scale, float* __restrict found) {
        float step = *scale / levels;
        for (i64 i = 0; i < n; i++) found[i] = ((float)codes[i] - levels) * step;
    });
}

void hocket_sign(const float* rows, i64 count, i64 size, i64 stride, const i64* counts, i64 block, float* means, u8* packed,
                 i64 threads) {
    encode_blocks(rows, count, size, stride, block, 1, 1, means, packed, threads,
                  [=](i64 row, const float* __restrict x, i64 first, i64 n, u8* __restrict codes, float* scale) {
        i64 real = (counts ? counts[row] : size) - first;
        float sum = total(x, n, [](Floats v) { return (Floats)((Ints)v & 0x7fffffff); });
        *scale = sum / (float)std::min(std::max<i64>(real, 1), block);
        for (i64 i = 0; i < n; i++) codes[i] = x[i] >= 0;
    });
}

void hocket_sign_decode(const float* means, i64 mean_stride, const u8* packed, i64 packed_stride, i64 count, i64 size, i64 block,
                        float* out, i64 threads) {
    decode_blocks(means, mean_stride, packed, packed_stride, count, size, block, 1, 1, out, threads,
                  [=](const u8* __restrict codes, i64 n, const float* scale, float* __restrict found) {
        float mean = *scale;
        for (i64 i = 0; i < n; i++) found[i] = codes[i] ? mean : -mean;
    });
}

void hocket_bins(const float* rows, i64 count, i64 size, i64 stride, const i64* counts, i64 block, float* levels, u8* packed,
                 i64 threads) {
    encode_blocks(rows, count, size, stride, block, 2, 2, levels, packed, threads,
                  [=](i64 row, const float* __restrict x, i64 first, i64 n, u8* __restrict codes, float* level) {
        i64 real = std::min(n, std::max<i64>((counts ? counts[row] : size) - first, 0));
        float most = peak(x, n), divisor = most < TINY ? TINY : most, number = (float)std::max<i64>(real, 1);
        alignas(64) float unit[TILE], off[TILE];
        for (i64 i = 0; i < n; i++) unit[i] = std::fabs(x[i]) / divisor;
        float mean = total(unit, n, [](Floats v) { return v; }) / number;
        for (i64 i = 0; i < real; i++) off[i] = unit[i] - mean;
        float spread = 3 * std::sqrt(total(off, real, [](Floats v) { return v * v; }) / number);
        u32 smallest = as_bits(1.0f);
        for (i64 i = 0; i < real; i++) smallest = std::min(smallest, as_bits(unit[i]));
        float lowest = std::max(as_float(smallest), mean - spread);
        float highest = std::min(most > 0 ? most / divisor : 0.0f, mean + spread);
        float low = lowest + (highest - lowest) * 0.25f, high = lowest + (highest - lowest) * 0.75f, edge = 0;
        for (int pass = 0; pass < 2; pass++) {
            edge = (high + low) / 2;  // never below a value beyond the count, which is 0
            Floats edges = edge - Floats{};
            float ups = total(unit, n, [=](Floats v) { return where(v > edges, 1.0f - Floats{}); });
            float above = total(unit, n, [=](Floats v) { return where(v > edges, v); });
            float below = total(unit, n, [=](Floats v) { return where(~(v > edges), v); });
            if (ups > 0) high = above / ups;
            if ((float)real > ups) low = below / ((float)real - ups);
        }
        level[0] = low * divisor;
        level[1] = high * divisor;
        for (i64 i = 0; i < n; i++) codes[i] = (u8)((unit[i] > edge ? 2 : 0) | (x[i] < 0 ? 1 : 0));
    });
}

void hocket_bins_decode(const float* levels, i64 level_stride, const u8* packed, i64 packed_stride, i64 count, i64 size, i64 block,
                        float* out, i64 threads) {
    decode_blocks(levels, level_stride, packed, packed_stride, count, size, block, 2, 2, out, threads,
                  [=](const u8* __restrict codes, i64 n, const float* level, float* __restrict found) {
        float low = level[0], high = level[1];
        for (i64 i = 0; i < n; i++) {
            float value = codes[i] & 2 ? high : low;
            found[i] = codes[i] & 1 ? -value : value;
        }
    });
}

void hocket_e3m0(const float* rows, i64 count, i64 size, i64 stride, i64 block, float* scales, u8* packed, i64 threads) {
    encode_blocks(rows, count, size, stride, block, 4, 1, scales, packed, threads,
                  [=](i64, const float* __restrict x, i64, i64 n, u8* __restrict codes, float* scale) {
        float most = peak(x, n), divisor = most < TINY ? TINY : most;
        *scale = divisor;
        for (i64 i = 0; i < n; i++) {
            int32_t bits = (int32_t)as_bits(std::fabs(x[i]) / divisor);
            int32_t exponent = (bits >> 23) - 126 + (bits >> 22 & 1);  // of a mantissa in [1/2, 1), rounded up from 3/4
            exponent = std::min(std::max(exponent, -5), 1) + 6;
            codes[i] = (u8)((bits > 0x3C000000 ? exponent : 0) + (x[i] < 0 ? 8 : 0));
        }
    });
}

void hocket_e3m0_decode(const float* scales, i64 scale_stride, const u8* packed, i64 packed_stride, i64 count, i64 size, i64 block,
                        float* out, i64 threads) {
    decode_blocks(scales, scale_stride, packed, packed_stride, count, size, block, 4, 1, out, threads,
                  [=](const u8* __restrict codes, i64 n, const float* scale, float* __restrict found) {
        float most = *scale;
        for (i64 i = 0; i < n; i++) {
            u32 code = codes[i], exponent = code & 7, power = exponent ? (exponent + 120) << 23 : 0;
            found[i] = as_float(power | code >> 3 << 31) * most;
        }
    });
}

void hocket_ternary(const float* rows, i64 count, i64 size, i64 stride, const i64* keys, const float* scale, u8* packed,
                    i64 threads) {
    constexpr i64 SOME = 5120;
    i64 bytes = (size + 4) / 5;
    shared(count, size, SOME, threads, [=](i64 row, i64 first, i64 end) {
        alignas(64) u8 codes[SOME + 8];
        float most = scale[row];
        u32 key = (u32)keys[row];
        for (i64 at = first; at < end; at += SOME) {
            i64 n = std::min(SOME, end - at);
            const float* __restrict x = rows + row * stride + at;
            u8* __restrict own = codes;
            for (i64 i = 0; i < n; i++) {
                int hit = uniform(key, (u32)(at + i)) * most < std::fabs(x[i]);
                own[i] = (u8)(1 + hit * ((x[i] > 0) - (x[i] < 0)));
            }
            std::memset(codes + n, 0, 5);
            u8* out = packed + row * bytes + at / 5;
            for (i64 i = 0; i < (n + 4) / 5; i++) {
                const u8* c = codes + 5 * i;
                out[i] = (u8)(c[0] + 3 * c[1] + 9 * c[2] + 27 * c[3] + 81 * c[4]);
            }
        }
    });
}

void hocket_ternary_decode(const float* scale, i64 scale_stride, const u8* packed, i64 packed_stride, i64 count, i64 size,
                           float* out, i64 threads) {
    shared(count, size, 5120, threads, [=](i64 row, i64 first, i64 end) {
        float values[256][8] = {}, most = scale[row * scale_stride];
        for (int byte = 0; byte < 256; byte++)
            for (int k = 0, rest = byte; k < 5; k++, rest /= 3) values[byte][k] = (float)(rest % 3 - 1) * most;
        const u8* codes = packed + row * packed_stride;
        float* found = out + row * size;
        i64 at = first;
        for (; at + 8 <= end; at += 5) std::memcpy(found + at, values[codes[at / 5]], 32);
        for (; at < end; at++) found[at] = values[codes[at / 5]][at % 5];
    });
}

void hocket_natural(const float* rows, i64 count, i64 size, i64 stride, const i64* keys, u8* exponents, u8* signs, i64 threads) {
    i64 bytes = (size + 7) / 8;
    shared(count, size, TILE, threads, [=](i64 row, i64 first, i64 end) {
        alignas(64) u8 codes[TILE + 8];
        u32 key = (u32)keys[row];
        for (i64 at = first; at < end; at += TILE) {
            i64 n = std::min(TILE, end - at);
            const float* __restrict x = rows + row * stride + at;
            u8 *__restrict exponent = exponents + row * size + at, *__restrict negative = codes;
            for (i64 i = 0; i < n; i++) {
                u32 raw = magnitude(x[i]), carried = (noise(key, (u32)(at + i)) & 0x7FFFFFu) + raw;
                u32 found = std::min(carried >> 23, 254u);
                exponent[i] = (u8)(raw < 0x800000u ? 0 : found);
            }
            for (i64 i = 0; i < n; i++) negative[i] = x[i] < 0;
            pack(codes, n, 1, signs + row * bytes + at / 8);
        }
    });
}

void hocket_natural_decode(const u8* exponents, i64 exponent_stride, const u8* signs, i64 sign_stride, i64 count, i64 size,
                           float* out, i64 threads) {
    shared(count, size, TILE, threads, [=](i64 row, i64 first, i64 end) {
        alignas(64) u8 codes[TILE + 8];
        for (i64 at = first; at < end; at += TILE) {
            i64 n = std::min(TILE, end - at);
            unpack(signs + row * sign_stride + at / 8, n, 1, codes);
            const u8* __restrict exponent = exponents + row * exponent_stride + at;
            float* __restrict found = out + row * size + at;
            for (i64 i = 0; i < n; i++) found[i] = as_float((u32)exponent[i] << 23 | (u32)codes[i] << 31);
        }
    });
}

// Values over their row's scale as float8_e4m3fn, rounded to nearest, ties to even.
void hocket_fp8(const float* rows, i64 count, i64 size, i64 stride, const float* scale, u8* out, i64 threads) {
    shared(count, size, TILE, threads, [=](i64 row, i64 first, i64 end) {
        const float* __restrict x = rows + row * stride;
        u8* __restrict found = out + row * size;
        float divisor = scale[row];
        for (i64 i = first; i < end; i++) {
            float value = x[i] / divisor;
            u32 raw = as_bits(value), m = raw & 0x7fffffffu, nan = m > 0x7f800000u;
            m = std::min(m, 0x43e00000u);  // 448, the largest
            u32 normal = (m + 0x7ffffu + (m >> 20 & 1)) >> 20;
            normal -= 120 << 3;
            u32 small = as_bits(as_float(m) + 16384.0f) - as_bits(16384.0f);  // below 2⁻⁶ values lie 2⁻⁹ apart
            u32 code = m < (121u << 23) ? small : normal;
            found[i] = (u8)((nan ? 0x7f : code) | (raw >> 24 & 0x80));
        }
    });
}

void hocket_fp8_decode(const u8* coded, i64 stride, const float* scale, i64 count, i64 size, float* out, i64 threads) {
    shared(count, size, TILE, threads, [=](i64 row, i64 first, i64 end) {
        const u8* __restrict code = coded + row * stride;
        float* __restrict found = out + row * size;
        float factor = scale[row];
        for (i64 i = first; i < end; i++) {
            u32 m = code[i] & 0x7fu, sign = (u32)(code[i] & 0x80) << 24;
            float normal = as_float((m << 20) + (120u << 23)), small = (float)(int32_t)m * 0.001953125f;
            u32 value = m < 8 ? as_bits(small) : m == 0x7f ? 0x7fc00000u : as_bits(normal);
            found[i] = as_float(value | sign) * factor;
        }
    });
}

// The k largest magnitudes of each row: indices in order, values, and the k-th with how many equal it (any of them may be null).
void hocket_largest(const float* rows, i64 count, i64 size, i64 stride, i64 k, i64* indices, float* values, float* level,
                    i64* equal, i64 threads) {
    shared(count, size, size, threads, [=](i64 row, i64, i64) {
        static thread_local Found found;
        const float* x = rows + row * stride;
        Edge edge = kth_of_row(x, size, k, 0x3f800000, found);
        if (level) level[row] = as_float(edge.level);
        if (equal) equal[row] = edge.equal;
        if (!indices) return;
        i64 at = row * k;
        chosen(found, edge, [&](u32 i) { indices[at] = i; values[at++] = x[i]; });
    });
}

void hocket_largest_of_chunks(const float* rows, i64 count, i64 size, i64 stride, i64 chunk, i64 k, i64* indices, i64 threads) {
    i64 whole = size / chunk * chunk, chunks = size / chunk;
    shared(count, whole, chunk, threads, [=](i64 row, i64 first, i64 end) {
        Found found;
        u32 guess = 0;
        for (i64 at = first; at < end; at += chunk) {
            Edge edge = kth_of_chunk(rows + row * stride + at, chunk, k, guess, found);
            guess = edge.level - std::min(edge.level, 1u << 18);  // a little less
            i64* out = indices + (row * chunks + at / chunk) * k;
            chosen(found, edge, [&](u32 i) { *out++ = at + i; });
        }
    });
}

// How many magnitudes of each row are above its level, and their indices and values, padded with zeros.
void hocket_count_above(const float* rows, i64 count, i64 size, i64 stride, const float* level, i64* counts,
                        i64 threads) {
    shared(count, size, size, threads, [=](i64 row, i64, i64) {
        counts[row] = count_from(rows + row * stride, size, as_bits(level[row]) + 1);
    });
}

void hocket_above(const float* rows, i64 count, i64 size, i64 stride, const float* level, i64 width, i64* indices, float* values,
                  i64 threads) {
    shared(count, size, size, threads, [=](i64 row, i64, i64) {
        const float* x = rows + row * stride;
        i64 at = row * width, end = at + width;
        each_from(x, size, as_bits(level[row]) + 1, [&](i64 i) {
            if (at < end) { indices[at] = i; values[at++] = x[i]; }
        });
        for (; at < end; at++) { indices[at] = 0; values[at] = 0; }
    });
}

// Zeros, then values at indices whose sixteen low bits are `low`; `blocks` says how many lie in each block of 65,536.
void hocket_put(const int32_t* blocks, i64 block_stride, i64 num_blocks, const int16_t* low, i64 low_stride, const float* values,
                i64 value_stride, i64 count, i64 width, i64 size, float* out) {
    for (i64 row = 0; row < count; row++) {
        float* found = out + row * size;
        std::memset(found, 0, size * 4);
        for (i64 block = 0, at = 0; block < num_blocks; block++) {
            i64 end = std::min(width, at + std::max<i64>(0, blocks[row * block_stride + block]));  // a peer may send any counts
            for (; at < end; at++) {
                i64 index = block << 16 | (uint16_t)low[row * low_stride + at];
                if (index < size) found[index] = values[row * value_stride + at];
            }
        }
    }
}

// Rice's code of sorted indices: how many bytes each row has in `low` and `unary`, ...
void hocket_rice_sizes(const i64* indices, i64 count, i64 width, const i64* counts, const i64* bits, i64* sizes) {
    for (i64 row = 0; row < count; row++) {
        i64 n = counts[row], k = bits[row], last = -1, spans = 0;
        for (i64 i = 0; i < n; i++) {
            spans += ((indices[row * width + i] - last - 1) >> k) + 1;
            last = indices[row * width + i];
        }
        sizes[2 * row] = (n + 7) / 8 * k;
        sizes[2 * row + 1] = (spans + 7) / 8;
    }
}

// ... and the bytes; what is given holds zeros.
void hocket_rice(const i64* indices, i64 count, i64 width, const i64* counts, const i64* bits, u8* low, i64 low_stride, u8* unary,
                 i64 unary_stride) {
    for (i64 row = 0; row < count; row++) {
        i64 k = bits[row], last = -1, at = -1;
        for (i64 i = 0; i < counts[row]; i++) {
            i64 gap = indices[row * width + i] - last - 1;
            last += gap + 1;
            at += (gap >> k) + 1;
            unary[row * unary_stride + (at >> 3)] |= (u8)(1 << (at & 7));
            u8* planes = low + row * low_stride + (i >> 3) * k;
            for (i64 bit = 0; bit < k; bit++) planes[bit] |= (u8)((gap >> bit & 1) << (i & 7));
        }
    }
}

void hocket_rice_count(const u8* unary, i64 stride, i64 bytes, i64 count, i64* counts) {
    for (i64 row = 0; row < count; row++) {
        i64 found = 0;
        for (i64 i = 0; i < bytes; i++) found += __builtin_popcount(unary[row * stride + i]);
        counts[row] = found;
    }
}

// Indices below `size`, and zeros behind them; whatever a peer has sent, nothing outside of its bytes is read.
void hocket_rice_read(const u8* low, i64 low_stride, i64 low_bytes, const u8* unary, i64 unary_stride, i64 unary_bytes, i64 count,
                      const i64* bits, i64 size, i64 width, i64* indices) {
    for (i64 row = 0; row < count; row++) {
        i64 k = bits[row], index = -1, last = -1, i = 0, *out = indices + row * width;
        for (i64 byte = 0; byte < unary_bytes; byte++)
            for (u32 left = unary[row * unary_stride + byte]; left; left &= left - 1, i++) {
                i64 at = byte * 8 + __builtin_ctz(left), gap = (at - last - 1) << k, first = (i >> 3) * k;
                last = at;
                for (i64 bit = 0; bit < k && first + bit < low_bytes; bit++)
                    gap += (i64)(low[row * low_stride + first + bit] >> (i & 7) & 1) << bit;
                index += gap + 1;
                out[i] = std::min(std::max<i64>(index, 0), size - 1);
            }
        for (; i < width; i++) out[i] = 0;
    }
}

// The mean of `senders` rows each, added in order.
void hocket_mean(const float* rows, i64 count, i64 senders, i64 size, i64 stride, float* out, i64 threads) {
    shared(count, size, 1024, threads, [=](i64 row, i64 first, i64 end) {
        for (i64 at = first; at < end; at += 1024) {
            i64 n = std::min<i64>(1024, end - at);
            float* __restrict sum = out + row * size + at;
            std::memcpy(sum, rows + row * senders * stride + at, n * 4);
            for (i64 k = 1; k < senders; k++) {
                const float* __restrict x = rows + (row * senders + k) * stride + at;
                for (i64 i = 0; i < n; i++) sum[i] += x[i];
            }
            for (i64 i = 0; i < n; i++) sum[i] /= (float)senders;
        }
    });
}

}  // extern "C"
