#include <bit>

#include "backend/cuda/checked_index.h"
#include "backend/cuda/codes/packs.h"
#include "backend/cuda/cuda_backend.h"
#include "backend/cuda/values.h"
#include "mantissa/backend/functions.h"

namespace mantissa {
namespace {

using namespace gpu;

struct SumsOfWarps {
  int64_t values[kThreads / kWarp];
};

// Calls put(i, value(0) + .. + value(i - 1)) for i in [0, count]. All threads of a block call it, each for its own i.
template <class Value, class Put>
__device__ void scan_in_block(int64_t count, Value value, Put put) {
  auto& of_warps = block_shared<SumsOfWarps>().values;
  int64_t preceding = 0;  // sum of all that earlier rounds had
  for (int64_t first = 0; first <= count; first += kThreads) {
    const int64_t i = first + thread(), own = i < count ? value(i) : 0;
    int64_t sum = own;
    for (unsigned by = 1; by < kWarp; by *= 2) {
      const int64_t earlier = shuffle(sum, lane() >= by ? lane() - by : lane());
      if (lane() >= by) sum += earlier;
    }
    barrier();  // behind those that still read an earlier round
    if (lane() == kWarp - 1) of_warps[warp()] = sum;
    barrier();
    int64_t all = preceding;
    for (unsigned w = 0; w < kThreads / kWarp; ++w) {
      if (w < warp()) preceding += of_warps[w];
      all += of_warps[w];
    }
    if (i <= count) put(i, preceding + sum - own);
    preceding = all;
  }
}

// The choices of one expert in the order of tokens: a block goes through all of them, a warp through its part of them.
struct ChoicesOfExpert {
  const int32_t* experts;
  int64_t total;
  int32_t expert;

  // Calls body(i, how many of the part are before it) for the choices of this thread. Returns how many the part of its warp has.
  template <class Body>
  __device__ int64_t each(Body body) const {
    constexpr unsigned kAtOnce = 8;  // loads of a lane before it waits for a vote
    const int64_t part = ceil_div(ceil_div(total, int64_t{kWarpsOfBlock}), int64_t{kWarp}) * kWarp, first = warp() * part;
    const int64_t end = first + part < total ? first + part : total;
    int64_t found = 0;
    MANTISSA_UNROLL_BY(1)
    for (int64_t from = first + lane(); from - lane() < end; from += kAtOnce * kWarp) {
      int32_t chosen[kAtOnce];
      MANTISSA_UNROLL
      for (unsigned a = 0; a < kAtOnce; ++a) chosen[a] = from + a * kWarp < end ? experts[from + a * kWarp] : -1;
      MANTISSA_UNROLL
      for (unsigned a = 0; a < kAtOnce; ++a) {
        const unsigned lanes = ballot(chosen[a] == expert);
        if (chosen[a] == expert) body(from + a * kWarp, found + std::popcount(lanes & ((1U << lane()) - 1U)));
        found += std::popcount(lanes);
      }
    }
    return found;
  }
};

struct FoundByWarps {
  int64_t values[kWarpsOfBlock];
};

// kept[e] = the rows of expert e: its assignments, at most `capacity` unless that is 0. A block has an expert. A choice of no expert, as of
// padding or one that is refused, gets row -1.
__global__ void __launch_bounds__(kThreads)
    count_choices(CheckedIndices experts, int64_t total, int64_t capacity, int32_t* kept, int32_t* rows) {
  auto& found = block_shared<FoundByWarps>().values;
  for_each_element(total, [=](int64_t i) {
    if (checked(experts, i) < 0) rows[i] = -1;
  });
  const int64_t of_warp = ChoicesOfExpert{experts.values, total, static_cast<int32_t>(block())}.each([](int64_t, int64_t) {});
  if (lane() == 0) found[warp()] = of_warp;
  barrier();
  if (thread() != 0) return;
  int64_t sum = 0;
  for (const int64_t of : found) sum += of;
  kept[block()] = static_cast<int32_t>(capacity > 0 && sum > capacity ? capacity : sum);
}

// Runs as one block. offsets = the sums of all earlier groups, padded.
__global__ void __launch_bounds__(kThreads) place_groups(const int32_t* kept, int64_t groups, int64_t multiple, int32_t* offsets) {
  scan_in_block(
      groups, [=](int64_t g) { return round_up(int64_t{kept[g]}, multiple); },
      [=](int64_t g, int64_t sum) { offsets[g] = static_cast<int32_t>(sum); });
}

// A block has an expert.
__global__ void __launch_bounds__(kThreads)
    place_choices(const int32_t* experts, int64_t total, const int32_t* kept, const int32_t* offsets, int32_t* rows, int32_t* assignments) {
  auto& found = block_shared<FoundByWarps>().values;
  const ChoicesOfExpert choices{experts, total, static_cast<int32_t>(block())};
  const int64_t of_warp = choices.each([](int64_t, int64_t) {});
  if (lane() == 0) found[warp()] = of_warp;
  barrier();
  int64_t before = 0;
  for (unsigned w = 0; w < warp(); ++w) before += found[w];
  const int64_t begin = offsets[block()], room = kept[block()];
  choices.each([=](int64_t i, int64_t earlier) {
    const int64_t place = before + earlier;
    rows[i] = place < room ? static_cast<int32_t>(begin + place) : -1;
    if (place < room) assignments[begin + place] = static_cast<int32_t>(i);
  });
}

// Runs as one block. counts [ranks, experts]. first[r, e] = where rows of a rank for an expert are among the arrivals; begins[e, r], with
// an end, where they go. sources may be null. Counts that do not fit are zeros.
__global__ void __launch_bounds__(kThreads, 1)
    place_arrivals(const int32_t* counts, int64_t ranks, int64_t experts, int64_t multiple, ArrivalRules rules, ErrorWord* error,
                   int64_t* first, int64_t* begins, int32_t* offsets, int32_t* sources) {
  const int64_t all = ranks * experts;
  const int64_t bad = first_bad(all, [=](int64_t i) { return !rules.counts.allows(counts[i]); });
  int64_t arrivals = 0, room = 0;
  for (int64_t i = thread(); i < all; i += kThreads) {
    arrivals += counts[i];
    room += round_up(int64_t{counts[i]}, multiple);
  }
  arrivals = block_sum(arrivals), room = block_sum(room);
  const bool good = bad == all && rules.arrivals.allows(arrivals) && rules.room.allows(room);
  if (!good && thread() == 0) {
    if (bad < all)
      allowed(error, rules.counts, bad, counts[bad]);
    else if (allowed(error, rules.arrivals, 0, arrivals))
      allowed(error, rules.room, 0, room);
  }
  scan_in_block(
      all, [=](int64_t i) { return good ? int64_t{counts[i]} : 0; },
      [=](int64_t i, int64_t sum) {
        if (i < all) first[i] = sum;
      });
  scan_in_block(
      all, [=](int64_t i) { return good ? round_up(int64_t{counts[i % ranks * experts + i / ranks]}, multiple) : 0; },
      [=](int64_t i, int64_t sum) {
        begins[i] = sum;
        if (sources != nullptr) sources[i] = static_cast<int32_t>(sum);
        if (i % ranks == 0) offsets[i / ranks] = static_cast<int32_t>(sum);
      });
}

// A block has the rows of a rank for an expert.
__global__ void __launch_bounds__(kThreads) list_arrivals(const int32_t* counts, int64_t ranks, int64_t experts, const int64_t* first,
                                                          const int64_t* begins, int32_t* rows, int32_t* assignments) {
  const int64_t from = block() % ranks * experts + block() / ranks, arrival = first[from], begin = begins[block()],
                end = begins[block() + 1];
  for (int64_t i = thread(); begin + i < end; i += kThreads) {
    const bool arrives = i < counts[from];
    if (arrives) rows[arrival + i] = static_cast<int32_t>(begin + i);
    assignments[begin + i] = arrives ? static_cast<int32_t>(arrival + i) : -1;
  }
}

struct alignas(16) SixteenBytes {
  uint32_t words[4];
};

// The rows of x by the assignments of Permute: those from `first` on, `held` of them.
struct RowsByAssignment {
  CheckedIndices assignments;
  int64_t per_row, first, held;

  // Returns -1 for an assignment to no row of x, or one that is refused.
  __device__ int64_t row(int64_t i) const {
    const int64_t assignment = checked(assignments, i), row = assignment / per_row - first;
    return assignment >= 0 && row >= 0 && row < held ? row : -1;
  }
};

// out[r] = x[row of r], or zeros; rows of so many units.
template <class Unit>
__global__ void __launch_bounds__(kThreads) permute(const std::byte* x, std::byte* out, RowsByAssignment by, int64_t rows, int64_t units) {
  for_each_element(rows * units, [=](int64_t i) {
    const int64_t to = i / units, from = by.row(to);
    Unit unit{};
    if (from >= 0) unit = load<Unit>(x + (from * units + (i - to * units)) * int64_t{sizeof(Unit)});
    store<Unit>(out + i * int64_t{sizeof(Unit)}, unit);
  });
}

constexpr unsigned kChoicesAtOnce = 4;  // so that loads do not wait for each other

// A choice that was dropped is a row of zeros. A sum is never -0, which they would change.
template <class T>
__global__ void __launch_bounds__(kThreads)
    unpermute(Packs<const T> x, CheckedIndices rows, Packs<T> out, int64_t tokens, int64_t assignments) {
  const int64_t packs = ceil_div(out.count, int64_t{kPack});
  for_each_element(tokens * packs, [=](int64_t i) {
    const int64_t token = i / packs, first = (i - token * packs) * kPack;
    Pack sum{};
    for (int64_t begin = 0; begin < assignments; begin += kChoicesAtOnce) {
      int64_t from[kChoicesAtOnce];
      Pack more[kChoicesAtOnce];
      MANTISSA_UNROLL
      for (unsigned n = 0; n < kChoicesAtOnce; ++n) from[n] = begin + n < assignments ? checked(rows, token * assignments + begin + n) : -1;
      MANTISSA_UNROLL
      for (unsigned n = 0; n < kChoicesAtOnce; ++n) more[n] = from[n] < 0 ? Pack{} : x.row(from[n]).read(first);
      MANTISSA_UNROLL
      for (unsigned n = 0; n < kChoicesAtOnce; ++n) {
        MANTISSA_UNROLL
        for (unsigned c = 0; c < kPack; ++c) sum.at[c] += more[n].at[c];
      }
    }
    out.row(token).write(first, sum);
  });
}

}  // namespace

void CudaBackend::execute(const DispatchTable& k) {
  const int64_t groups = k.offsets.elements() - 1, total = k.experts.elements();
  const Tensor kept = empty(*this, Dtype::i32, {groups});
  const CheckedIndices experts = checked(k.experts, IndexRule::optional("dispatch_table", "experts", groups));
  auto *const counts = kept.device_data<int32_t>(), *const offsets = k.offsets.device_data<int32_t>(),
              *const rows = k.rows.device_data<int32_t>();
  execute(Fill{.out = k.assignments, .value = -1.0});
  launch(count_choices, {groups, kThreads}, experts, total, k.capacity, counts, rows);
  launch(place_groups, {1, kThreads}, counts, groups, k.multiple, offsets);
  launch(place_choices, {groups, kThreads}, experts.values, total, counts, offsets, rows, k.assignments.device_data<int32_t>());
}

void CudaBackend::execute(const ArrivalTable& k) {
  const int64_t ranks = k.counts.dim(0), experts = k.counts.dim(1), groups = ranks * experts;
  const Tensor places = empty(*this, Dtype::u8, {(2 * groups + 1) * int64_t{sizeof(int64_t)}});
  auto* const first = reinterpret_cast<int64_t*>(places.device_bytes());
  int64_t* const begins = first + groups;
  const int32_t* const counts = k.counts.device_data<int32_t>();
  launch(place_arrivals, {1, kThreads}, counts, ranks, experts, k.multiple, ArrivalRules(k), error_word(), first, begins,
         k.offsets.device_data<int32_t>(), data_or_null<int32_t>(k.source_offsets));
  launch(list_arrivals, {groups, kThreads}, counts, ranks, experts, first, begins, k.rows.device_data<int32_t>(),
         k.assignments.device_data<int32_t>());
}

void CudaBackend::execute(const Permute& k) {
  const RowsByAssignment rows_of{checked(k.assignments, rule_of(k)), k.per_row, k.part.first, shape_of(k.x)[0]};
  const auto permute_rows = [&](const Tensor& x, const Tensor& out) {
    const int64_t bytes = out.dim(1) * dtype_bytes(out.dtype()), rows = out.dim(0);
    const auto whole = [&](uint64_t unit) {  // true if every row is whole units that are aligned
      return (std::bit_cast<uint64_t>(x.device_bytes()) | std::bit_cast<uint64_t>(out.device_bytes()) | static_cast<uint64_t>(bytes)) %
                 unit ==
             0;
    };
    const auto by = [&]<class Unit>(Unit) {
      const int64_t units = bytes / int64_t{sizeof(Unit)};
      launch(permute<Unit>, {blocks_for(rows * units), kThreads}, x.device_bytes(), out.device_bytes(), rows_of, rows, units);
    };
    if (whole(16)) return by(SixteenBytes());
    if (whole(4)) return by(uint32_t{});
    whole(2) ? by(uint16_t{}) : by(uint8_t{});
  };
  if (const auto* x = std::get_if<Tensor>(&k.x)) return permute_rows(*x, std::get<Tensor>(k.out));
  const auto &from = std::get<QuantizedTensor>(k.x), &to = std::get<QuantizedTensor>(k.out);
  permute_rows(from.codes, to.codes);
  permute_rows(from.scales, to.scales);
}

void CudaBackend::execute(const Unpermute& k) {
  const CheckedIndices rows = checked(k.rows, IndexRule::optional("unpermute", "rows", k.x.dim(0)));
  with_values(k.x.dtype(), [&]<class T>() {
    const int64_t tokens = k.out.dim(0), columns = k.out.dim(1);
    const T* const x = k.x.device_data<T>();
    T* const out = k.out.device_data<T>();
    const RowPacks of{columns, begin_at_packs(columns, x, out)};
    const int64_t packs = tokens * ceil_div(columns, int64_t{kPack});
    launch(unpermute<T>, {blocks_for(packs), kThreads}, of(x), rows, of(out), tokens, k.rows.dim(1));
  });
}

}  // namespace mantissa
