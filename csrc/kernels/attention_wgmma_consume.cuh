// A consumer warpgroup of the warpgroup kernel: 64 query rows of a tile against the ring of KV blocks that
// all consumers of the CTA read and the producers (attention_wgmma_load.cuh) fill.
//
// An item: the scores of its last block and their softmax; then, block by block towards its first, a consumer
// starts the product of Q with that block's keys and the product of the weights at hand with their values,
// and the block's softmax runs beside the latter. Consumers take turns at starting products, so that the
// softmax of one also runs beside the products of the others. At last the state is written: o and lse, or a
// partial of both.
#pragma once

#include "kernels/attention_wgmma_load.cuh"
#include "kernels/attention_wgmma_store.cuh"
#include "kernels/attention_wgmma_weights.cuh"
#include "kernels/sm90_wgmma.cuh"
#include "kernels/variant.cuh"

namespace jaxinfer {

template <class Config, class Variant>
class WgmmaConsumer {
  using Type = Element<Config::kDType>;
  using Shared = WgmmaShared<Config>;
  using Exponents = typename Select<Variant::kCapped, CappedExponents, LinearExponents>::Type;
  static constexpr int kConsumers = Shared::kConsumers;
  static constexpr int kBlock = Config::kBlockKV;
  static constexpr int kColumns = kBlock / 8;  // pieces of eight columns
  static constexpr int kPieces = Config::kHeadDimVo / 8;
  static constexpr bool kPaged = !Config::kContiguous;
  static constexpr bool kGather = kPaged && Config::kPageBox == 0;
  static constexpr bool kPositionRule = (Config::kRules & kPositionRules) != 0;
  static constexpr bool kHidesBefore = (Config::kRules & kRuleWindowLeft) != 0;  // at an item's front, too
  static constexpr bool kPingPong = Config::kPingPong != 0;
  static constexpr bool kClearsBeside = kConsumers == 2 && kPieces <= 16;  // where registers allow that
  static constexpr int kEarly = Variant::kSoftmax ? Config::kEarlyColumns / 8 : 0;
  // Of an item's first block only what is seen counts: P V takes its rows in parts of kValuePart, softmax its
  // columns in halves. Three consumers have no registers for that. Half of Q K^T, in a branch of its own,
  // lost what it saved to the assembler, which ran out of registers and products then waited for each other.
  static constexpr int kValuePart = kConsumers == 2 && kBlock % 32 == 0 ? 32 : kBlock;
  static constexpr bool kParts = kValuePart < kBlock;
  static constexpr bool kNarrows = kParts && kBlock % 64 == 0 && Variant::kSoftmax;
  static_assert(!Variant::kQuery && !Variant::kKey && !Variant::kValue, "holes of portable kernels alone");

 public:
  JAXINFER_DEVICE WgmmaConsumer(const AttentionParams& params, const VariantOperands& operands, char* memory)
      : params_(params),
        operands_(operands),
        memory_(memory),
        columns_{memory},
        number_(0),
        barriers_{shared_address(memory + Shared::kBarriers)},
        consumer_(static_cast<int>(__reduce_max_sync(kFullWarp, threadIdx.x / kWarpgroupThreads))),
        k_slot_(0),
        v_slot_(0) {}

  JAXINFER_DEVICE void run() {
    if (kPingPong && consumer() == 0) named_arrive(kTurn, 2 * kWarpgroupThreads);
    for (set_number(0);; set_number(number() + 1)) {
      wait_barrier(barriers_.query_full(has_split_query<Config>(params_) ? consumer() : 0), number() & 1);
      __syncwarp();
      if (slot().is_end != 0) break;
      if (slot().num_blocks > 0) {
        run_item();
      } else {  // not by WgmmaStore: another source of o would leave too few registers for products in flight
        if (item().out < 0) {
          write_empty<ConsumerConfig<Config>>(params_, item(), slot().cursor.head);
        } else {
          write_empty_partial<ConsumerConfig<Config>, Variant>(params_, item(), slot().cursor.head);
        }
        arrive(barriers_.query_empty(consumer()));
      }
    }
  }

  // Both read again at every use: registers are for the products.
  static JAXINFER_DEVICE int lane() { return fresh_thread_index() & 31; }
  static JAXINFER_DEVICE int warp() { return fresh_thread_index() >> 5; }
  // Tile row of this thread's fragment row r.
  static JAXINFER_DEVICE int tile_row(int r) { return warp() * 16 + (lane() >> 2) + r * 8; }
  JAXINFER_DEVICE ItemRows<Config::kPacked> rows() const {
    return ItemRows<Config::kPacked>{slot().cursor, params_.group_divider};
  }
  JAXINFER_DEVICE const Item& item() const { return slot().cursor.item; }

  // Of maxima to logits and to base-2 exponents.
  JAXINFER_DEVICE float max_scale() const { return jaxinfer::max_scale<Variant>(params_.variant); }
  JAXINFER_DEVICE float scale() const { return exponent_scale(max_scale()); }

  JAXINFER_DEVICE Exponents exponents() const {
    if constexpr (Variant::kCapped) {
      return CappedExponents(params_.variant.logits_soft_cap, fragment_scale<Variant>(params_.variant));
    } else {
      return LinearExponents{scale()};
    }
  }

  JAXINFER_DEVICE Row make_row(int i) const {
    const int token = item().token_begin + rows().token(i);
    return Row{item().bsr_row, token, __ldg(params_.q_pos + token), rows().qo_head(i), rows().kv_head()};
  }

 private:
  // Barrier ids; 0 is the CTA's own. A warpgroup waits for its turn on kTurn + its number; kGroup is its own.
  static constexpr int kTurn = 1;
  static constexpr int kGroup = kTurn + kConsumers;

  // Of a reduction, which is a uniform register, as all that follows from it then is. From a thread's index
  // descriptors of Q went through two registers of every thread each: 9% more instructions with three
  // consumers, except where those have no register to spare for it.
  JAXINFER_DEVICE int consumer() const {
    constexpr bool kSpare = kConsumers == 2 || !kPaged || !Variant::kLogits;
    return kSpare ? consumer_ : fresh_thread_index() / kWarpgroupThreads;
  }
  // Of fragment row r. Idle rows copy a real one; their results are not read.
  JAXINFER_DEVICE Row hole_row(int r) const { return make_row(min(tile_row(r), rows().num_rows() - 1)); }

  JAXINFER_DEVICE const ItemSlot& slot() const {
    return reinterpret_cast<const ItemSlot*>(memory_ + Shared::kItems)[number() % kItemSlots];
  }
  // Which item this is, of those of the CTA.
  JAXINFER_DEVICE int number() const { return kConsumers < 3 ? number_ : number_in_memory(); }
  JAXINFER_DEVICE void set_number(int number) {
    if constexpr (kConsumers < 3) {
      number_ = number;
    } else {
      __syncwarp();
      number_in_memory() = number;  // every lane writes the same
      __syncwarp();
    }
  }
  JAXINFER_DEVICE int& number_in_memory() const {
    return reinterpret_cast<int*>(memory_ + Shared::kNumbers)[warp()];
  }

  JAXINFER_DEVICE void run_item() {
    const int first = slot().first;
    int begin = first + (slot().num_blocks - 1) * kBlock;
    WgmmaStore<Config, Variant, WgmmaConsumer> store(params_, operands_, *this, weights_.state(), o_);
    first_block(begin, begin == first);
    if (Shared::kAsksOnce && begin != first) find_holes();
    // Of a reduction, which is a uniform register: nothing stands between a block's two products but what
    // branches on it.
    int columns = __reduce_max_sync(kFullWarp, slot().kv_end - begin);
#pragma unroll 1
    while (begin != first) {
      begin -= kBlock;
      next_block(begin, begin == first, columns);
      columns = kBlock + 1;
    }
    wait_values();
    start_values(columns);
    store.write_sums();
    wait_products<0>();
    pin_registers(o_);
    release_values(lane() == 0);
    store.write_output();
  }
  // Columns that every row of this warp sees, to shared memory, and those that all see.
  JAXINFER_DEVICE void find_ranges() {
    int begin = slot().kv_begin, end = slot().kv_end;
    if constexpr (kPositionRule) {
      const int offset = slot().kv_offset;
      const int i = warp() * 16 + (lane() & 15);
      const bool positions = kPaged && params_.block_pos != nullptr;
      if (positions) {
        begin = kInt32Min;
        end = kInt32Max;
      }
      if (i < rows().num_rows()) {
        const int token = item().token_begin + rows().token(i);
        const Visible seen = visible_positions<Config::kRules>(params_.variant, __ldg(params_.q_pos + token));
        const int64_t shift = positions ? 0 : offset;
        end = static_cast<int>(min(int64_t{end}, max(seen.last - shift + !positions, int64_t{begin})));
        begin = static_cast<int>(max(int64_t{begin}, min(seen.first - shift, int64_t{kInt32Max})));
      }
      ranges()[i] = ColumnRange{begin, end};
      begin = __reduce_max_sync(kFullWarp, begin);
      end = __reduce_min_sync(kFullWarp, end);
    }
    clear_begin_ = begin;
    clear_end_ = end;
    __syncwarp();
  }
  // Where pages are missing no column is clear from the second block on, whose keys come with the news.
  JAXINFER_DEVICE void find_holes() {
    wait_keys();
    bool whole = true;
    if (lane() == 0) whole = columns_.has_whole_item(k_slot_.stage());  // as in all_present()
    clear_end_ = __reduce_min_sync(kFullWarp, whole ? clear_end_ : kInt32Min);
  }
  JAXINFER_DEVICE ColumnRange* ranges() const {
    return reinterpret_cast<ColumnRange*>(memory_ + Shared::kRanges);
  }
  // Of fragment row r.
  JAXINFER_DEVICE ColumnRange range(int r) const {
    return kPositionRule ? ranges()[tile_row(r)] : ColumnRange{slot().kv_begin, slot().kv_end};
  }

  JAXINFER_DEVICE void start_scores(float (&s)[4 * kColumns]) {
    // Forgotten: descriptors made before the loop would come to uniform registers one by one.
    const uint32_t q = matrix_descriptor(
        shared_address(memory_ + Shared::kQuery) + forget(consumer()) * 64 * kPanelBytes, 16);
    const uint32_t k =
        matrix_descriptor(shared_address(memory_ + Shared::kK) + k_slot_.stage() * Shared::kKBytes, 16);
    pin_registers(s);
    fence_products();
#pragma unroll
    for (int i = 0; i < Config::kHeadDimQk / 16; ++i) {
      Wgmma<kBlock>::template shared<Config::kDType, Shared::kKPattern>(
          s, q + (i / 4) * (Shared::kQueryPanel >> 4) + (i % 4) * 2,
          k + (i / 4) * (Shared::kNextPanel >> 4) + (i % 4) * 2, i != 0);
    }
    commit_products();
  }
  // `columns` of the block, the same in all lanes, are not behind the item's end; up to kBlock only in its
  // first block, which overwrites o.
  JAXINFER_DEVICE void start_values(int columns) {
    pin_registers(o_);
    constexpr int kTwo = kBlock > 2 * kValuePart ? 2 * kValuePart : kValuePart;
    constexpr int kThree = kBlock > 3 * kValuePart ? 3 * kValuePart : kTwo;
    if (kValuePart < kBlock && columns <= kThree) {
      if (kThree > kTwo && columns > kTwo) {
        start_some_values<kThree>(false);
      } else if (kTwo > kValuePart && columns > kValuePart) {
        start_some_values<kTwo>(false);
      } else {
        start_some_values<kValuePart>(false);
      }
    } else {
      start_some_values<kBlock>(columns > kBlock);
    }
  }
  template <int kWidth>
  JAXINFER_DEVICE void start_some_values(bool accumulate) {
    const uint32_t v = matrix_descriptor(
        shared_address(memory_ + Shared::kV) + v_slot_.stage() * Shared::kVBytes, Shared::kNextPanel);
    fence_products();
#pragma unroll
    for (int i = 0; i < kWidth / 16; ++i) {
      Wgmma<Config::kHeadDimVo>::template registers<Config::kDType, Shared::kVPattern>(
          o_, p_[4 * i], p_[4 * i + 1], p_[4 * i + 2], p_[4 * i + 3], v + i * (2 * Shared::kVPattern >> 4),
          accumulate || i != 0);
    }
    commit_products();
  }
  JAXINFER_DEVICE void wait_keys() { wait_barrier(barriers_.k_full(k_slot_.stage()), k_slot_.parity()); }
  JAXINFER_DEVICE void wait_values() { wait_barrier(barriers_.v_full(v_slot_.stage()), v_slot_.parity()); }
  JAXINFER_DEVICE void release_keys(bool leads, bool last) {
    if constexpr (kPaged) __syncwarp();  // every lane has read which columns are there
    arrive_if(leads, barriers_.k_empty(k_slot_.stage()));
    if (last) arrive(barriers_.query_empty(consumer()));  // by every reader of the item's slot
    k_slot_.advance();
  }
  JAXINFER_DEVICE void release_values(bool leads) {
    if (leads) arrive(barriers_.v_empty(v_slot_.stage()));
    v_slot_.advance();
  }

  // What the copy engine brought behind the item's last row, in its first block, is whatever lies there, and
  // 0 * NaN would reach the sums. Every warpgroup writes these zeros, all the same ones, so that none has to
  // wait for another.
  JAXINFER_DEVICE void clear_tail(int begin) {
    // Page boxes that are not there are zeros already; parts of P V that nothing is seen of are left out.
    constexpr int kWhole = Config::kPageBox > 0 ? Config::kPageBox : kValuePart;
    const int tail = slot().kv_end - begin;
    const int end = min((tail + kWhole - 1) / kWhole * kWhole, kBlock);
    if (kGather || tail >= end) return;
    wait_values();
    const uint32_t v = shared_address(memory_ + Shared::kV) + v_slot_.stage() * Shared::kVBytes;
    const int chunks = (end - tail) * 8;
#pragma unroll 1
    for (int i = fresh_thread_index() % kWarpgroupThreads; i < chunks * Shared::kPanelsVo;
         i += kWarpgroupThreads) {
      const int panel = i / chunks;
      const int in_panel = i - panel * chunks + tail * 8;
      store_shared(
          v + panel * Shared::kNextPanel + (in_panel >> 6) * Shared::kVPattern + (in_panel & 63) * 16,
          make_uint4(0, 0, 0, 0));
    }
    fence_tensor_proxy();
    named_sync(kGroup + consumer(), kWarpgroupThreads);
  }

  // What an item needs besides its products is found beside the first of them.
  JAXINFER_DEVICE void first_block(int begin, bool last) {
    float s[4 * kColumns];
    wait_keys();
    start_scores(s);
    const bool leads = lane() == 0;
    find_ranges();
    const bool all_seen = all_present(leads, sees_all(begin));
    weights_.clear();
    if constexpr (kClearsBeside) clear_tail(begin);
    const bool narrow = kNarrows && __all_sync(kFullWarp, slot().kv_end - begin <= kBlock / 2);
    wait_products<0>();
    pin_registers(s);
    finish_scores(begin, s, all_seen, leads, last, narrow);
    if constexpr (Variant::kSoftmax) {
      weights_.first(s, exponents(), p_, narrow);
    } else {
      weights_.plain(s, p_);
    }
    if constexpr (!kClearsBeside) clear_tail(begin);
  }

  // `columns`: those of the block before, see start_values().
  JAXINFER_DEVICE void next_block(int begin, bool last, int columns) {
    float s[4 * kColumns];
    wait_keys();
    if constexpr (kPingPong) named_sync(kTurn + consumer(), 2 * kWarpgroupThreads);
    start_scores(s);
    wait_values();
    start_values(columns);
    if constexpr (kPingPong) {
      named_arrive(kTurn + (consumer() + 1 == kConsumers ? 0 : consumer() + 1), 2 * kWarpgroupThreads);
    }
    const bool leads = lane() == 0;
    bool all_seen = sees_all(begin);
    if constexpr (kPaged && !Shared::kAsksOnce) {
      all_seen = all_present(leads, all_seen);
      split_block(params_.num_tokens);
    }
    wait_products<1>();
    pin_registers(s);
    finish_scores(begin, s, all_seen, leads, last);
    if constexpr (kEarly > 0) {
      weights_.start(s, exponents_behind());
      // Else the wait moves up into the softmax that should run before it (5% at head dim 128).
      split_block(params_.num_tokens);
    }
    wait_products<0>();
    pin_registers(o_);
    release_values(leads);
    if constexpr (Variant::kSoftmax) {
      if constexpr (kEarly == 0) weights_.start(s, exponents());
      weights_.finish(s, exponents_behind(), p_, o_);
    } else {
      weights_.plain(s, p_);
    }
  }

  // Position of column c of the block.
  JAXINFER_DEVICE int position(int begin, int c) const {
    return kPaged && params_.block_pos != nullptr ? positions()[c] : slot().kv_offset + begin + c;
  }
  JAXINFER_DEVICE const int* positions() const { return columns_.positions(k_slot_.stage()); }
  // Whether every column of the block whose keys came is there, and `besides`. Only lane 0, which gives the
  // slot back, reads: racecheck would not see that the reads of others end before it arrives.
  JAXINFER_DEVICE bool all_present(bool leads, bool besides) const {
    if constexpr (!kPaged) return besides;
    bool all = besides;
    if (leads) all = besides & columns_.has_all(k_slot_.stage());
    return __all_sync(kFullWarp, all);
  }

  // Logits and masks of a block whose products are done; then its keys are given back by the lane that
  // `leads`. Whether anything is to be hidden was found before the wait for the products, which hides the way
  // to shared memory; as a vote, because what the assembler can put off until behind the wait it does.
  JAXINFER_DEVICE void finish_scores(int begin, float (&s)[4 * kColumns], bool all_seen, bool leads,
                                     bool last, bool narrow = false) {
    if constexpr (Variant::kLogits || !Variant::kSoftmax) {
      apply_logits(begin, s);
    } else if (params_.variant.sm_scale < 0.0f) {
#pragma unroll
      for (int i = 0; i < 4 * kColumns; ++i) s[i] = -s[i];
    }
    if (Variant::kMask || !all_seen) hide_columns(begin, s, leads, narrow);
    release_keys(leads, last);
  }

  // Whether nothing of a block is to be hidden, as far as ranges can tell.
  JAXINFER_DEVICE bool sees_all(int begin) const {
    return !by_position() && begin >= clear_begin_ && begin + kBlock <= clear_end_;
  }
  JAXINFER_DEVICE bool by_position() const { return kPaged && kPositionRule && params_.block_pos != nullptr; }
  // What is not a whole block of columns that all rows see; by itself and with few branches, because all
  // other blocks would wait for what it reads and join warps behind what diverges here. First what to keep, a
  // bit per column and row; then the scores.
  JAXINFER_DEVICE void hide_columns(int begin, float (&s)[4 * kColumns], bool leads, bool narrow) const {
    uint32_t keep[2];
    const bool all_there = !Variant::kMask && all_present(leads, true);
    if (all_there && !by_position() && (kHidesBefore || begin >= slot().kv_begin)) {
#pragma unroll
      for (int r = 0; r < 2; ++r) keep[r] = columns_in(begin, range(r));
    } else {
      // Positions ascend along a row's list.
      const bool inside = all_there & (begin >= slot().kv_begin) & (begin + kBlock <= slot().kv_end) &
                          (positions()[0] >= clear_begin_) & (positions()[kBlock - 1] < clear_end_);
      if (inside) return;
#pragma unroll
      for (int r = 0; r < 2; ++r) keep[r] = visible_columns(begin, r);
    }
    keep_columns<0, kColumns / 2>(keep, s);
    if (!narrow) keep_columns<kColumns / 2, kColumns>(keep, s);
  }

  template <int kFirst, int kEnd>
  static JAXINFER_DEVICE void keep_columns(const uint32_t (&keep)[2], float (&s)[4 * kColumns]) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
#pragma unroll
      for (int i = 2 * kFirst; i < 2 * kEnd; ++i) {
        float& x = s[4 * (i >> 1) + 2 * r + (i & 1)];
        x = (keep[r] >> i & 1) != 0 ? x : hidden_score<Variant::kSoftmax, Variant::kCapped>();
      }
    }
  }

  // A bit for each of this thread's columns, two of every eight: those inside of a row's range.
  static JAXINFER_DEVICE uint32_t columns_in(int begin, const ColumnRange& seen) {
    const int first = begin + 2 * (lane() & 3);
    const uint32_t kept = columns_before(seen.end - first);
    return kHidesBefore ? kept & ~columns_before(seen.begin - first) : kept;
  }
  // Those before `end`, counted from this thread's first one.
  static JAXINFER_DEVICE uint32_t columns_before(int end) {
    const int count = 2 * (end >> 3) + min(end & 7, 2);
    return end <= 0 ? 0 : ~0u >> (32 - min(count, 32));
  }

  // The same where columns may be missing or lie anywhere, and for the variant's mask; in a loop that needs
  // few registers.
  JAXINFER_DEVICE uint32_t visible_columns(int begin, int r) const {
    const bool by_position = this->by_position();
    const ColumnRange seen = range(r);
    const int last = by_position ? seen.end : seen.end - 1;
    const Row row = Variant::kMask ? hole_row(r) : Row{};
    const Variant variant(params_, operands_, row);
    uint32_t keep = 0;
#pragma unroll 1
    for (int i = 0; i < 2 * kColumns; ++i) {
      const int c = 2 * (lane() & 3) + (i >> 1) * 8 + (i & 1);
      const int index = begin + c;
      bool kept = (index >= slot().kv_begin) & (index < slot().kv_end);
      if constexpr (kPaged) kept = kept & columns_.has(k_slot_.stage(), c);
      const int kv_pos = kPositionRule || Variant::kMask ? position(begin, c) : 0;
      const int at = by_position ? kv_pos : index;
      kept = kept & (at >= seen.begin) & (at <= last);
      if constexpr (Variant::kMask) kept = kept && variant.mask(row, Col{kv_pos, index});
      keep |= static_cast<uint32_t>(kept) << i;
    }
    return keep;
  }

  // Products to logits, through the variant where it wants that.
  JAXINFER_DEVICE void apply_logits(int begin, float (&s)[4 * kColumns]) const {
    const int first = 2 * (lane() & 3);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const Row row = Variant::kLogits ? hole_row(r) : Row{};
      const Variant variant(params_, operands_, row);
#pragma unroll
      for (int j = 0; j < kColumns; ++j) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int c = first + 8 * j + e;
          float& x = s[4 * j + 2 * r + e];
          x *= params_.variant.sm_scale;
          if constexpr (Variant::kLogits) x = variant.logits(x, row, Col{position(begin, c), begin + c});
        }
      }
    }
  }

  // Exponents by a factor that the assembler does not know before this point: they stay behind the arrivals
  // that give slots of K and V back. Else they are moved up past them, and producers get the slots hundreds
  // of cycles late (4 to 6% at head dim 128, more at the power limit). A cap's with three consumers may move.
  JAXINFER_DEVICE Exponents exponents_behind() const {
    constexpr bool kStay = kConsumers < 3 || !Variant::kCapped;  // 2% slower where they stay
    Exponents known = exponents();
    if constexpr (kStay) known.leading() = behind(known.leading(), params_.num_tokens);
    return known;
  }

  const AttentionParams& params_;
  const VariantOperands& operands_;
  char* memory_;
  WgmmaColumns<Config> columns_;
  int number_;  // with fewer than three consumers
  WgmmaBarriers<Config> barriers_;
  int consumer_;
  RingCursor<Shared::kStages> k_slot_, v_slot_;
  // Of the item: all rows of the warp see columns [clear_begin, clear_end), see ColumnRange.
  int clear_begin_, clear_end_;
  WgmmaWeights<Type, Exponents, kColumns, kPieces, kEarly> weights_;
  uint32_t p_[2 * kColumns];  // weights of the block whose product with V comes next
  float o_[4 * kPieces];
};

}  // namespace jaxinfer
