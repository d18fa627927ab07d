#include "block_map.hpp"

#include <algorithm>
#include <bit>
#include <limits>
#include <string>

namespace harli {

namespace {

uint64_t below(int position) { return position >= 64 ? ~uint64_t{0} : (uint64_t{1} << position) - 1; }

void set_bit(std::vector<uint64_t>& bits, uint32_t at) { bits[at / 64] |= uint64_t{1} << at % 64; }
void clear_bit(std::vector<uint64_t>& bits, uint32_t at) { bits[at / 64] &= ~(uint64_t{1} << at % 64); }
bool test_bit(const std::vector<uint64_t>& bits, uint32_t at) { return (bits[at / 64] >> at % 64 & 1) != 0; }

}  // namespace

BlockMap::BlockMap(Grid grid)
    : grid_(grid), held_(grid.rows), open_row_(grid.rows), row_free_(grid.rows), row_ready_(grid.rows),
      tag_(grid.blocks(), not_free), epoch_(grid.blocks()), free_(1, Bits((grid.blocks() + 63) / 64)),
      open_((grid.blocks() + 63) / 64) {}

BlockMap::Bits& BlockMap::bits_of(Tag tag) {
    while (free_.size() <= tag) free_.emplace_back(open_.size());
    return free_[tag];
}

void BlockMap::set_open(uint32_t row, bool open) {
    open_row_[row] = open;
    for (uint32_t at = row * grid_.columns; at < (row + 1) * grid_.columns; ++at) {
        open ? set_bit(open_, at) : clear_bit(open_, at);
    }
}

void BlockMap::add_row(uint32_t row, Fence fence) {
    bits_of(fence.tag);  // may throw, where nothing has changed yet
    held_[row] = true;
    set_open(row, true);
    give(row * grid_.columns, grid_.columns, fence);
}

void BlockMap::refence_row(uint32_t row, Fence fence) {
    bits_of(fence.tag);
    take(row * grid_.columns, grid_.columns);
    give(row * grid_.columns, grid_.columns, fence);
}

void BlockMap::remove_row(uint32_t row) {
    take(row * grid_.columns, grid_.columns);
    set_open(row, false);
    held_[row] = false;
}

Fence BlockMap::fence_of(uint32_t block) const { return {tag_[block], epoch_[block]}; }

void BlockMap::take(uint32_t first, uint32_t count) {
    for (uint32_t at = first; at < first + count; ++at) {
        const Tag tag = tag_[at];
        clear_bit(free_[tag], at);
        tag_[at] = not_free;
        --row_free_[at / grid_.columns];
        --free_blocks_;
        if (tag != ready_tag) continue;
        --row_ready_[at / grid_.columns];
        --ready_blocks_;
    }
}

void BlockMap::give(uint32_t first, uint32_t count, Fence fence) {
    Bits& bits = bits_of(fence.tag);
    for (uint32_t at = first; at < first + count; ++at) {
        set_bit(bits, at);
        tag_[at] = fence.tag;
        epoch_[at] = fence.epoch;
        ++row_free_[at / grid_.columns];
        ++free_blocks_;
        if (fence.tag != ready_tag) continue;
        ++row_ready_[at / grid_.columns];
        ++ready_blocks_;
    }
}

void BlockMap::promote(Tag tag, uint64_t passed_epoch) {
    Bits& bits = bits_of(tag);
    for (size_t word = 0; word < bits.size(); ++word) {
        for (uint64_t left = bits[word]; left != 0; left &= left - 1) {
            const auto at = static_cast<uint32_t>(word * 64 + static_cast<size_t>(std::countr_zero(left)));
            if (epoch_[at] > passed_epoch) continue;
            take(at, 1);
            give(at, 1, Fence{});
        }
    }
}

// Maximal runs of blocks that `tag` may use, highest first, as visit(first, end) -> whether to go on.
template <typename Visit>
void BlockMap::each_run_downwards(Tag tag, Visit&& visit) const {
    const Bits& ready = free_[ready_tag];
    const Bits& own = tag < free_.size() ? free_[tag] : ready;
    int64_t end = -1;  // of the run that reaches down to here
    for (size_t word = open_.size(); word-- > 0;) {
        const uint64_t usable = (ready[word] | own[word]) & open_[word];
        const auto base = static_cast<int64_t>(word) * 64;
        if (usable == ~uint64_t{0}) {
            if (end < 0) end = base + 64;
            continue;
        }
        for (int position = 64; position > 0;) {
            const uint64_t sought = (end < 0 ? usable : ~usable) & below(position);
            if (sought == 0) break;
            position = 63 - std::countl_zero(sought);
            if (end < 0) {
                end = base + position + 1;
                continue;
            }
            if (!visit(static_cast<uint32_t>(base + position + 1), static_cast<uint32_t>(end))) return;
            end = -1;
        }
    }
    if (end >= 0) visit(0, static_cast<uint32_t>(end));
}

uint32_t BlockMap::empty_rows_touched(uint32_t first, uint32_t count) const {
    uint32_t touched = 0;
    for (uint32_t row = first / grid_.columns; row <= (first + count - 1) / grid_.columns; ++row) {
        touched += row_free_[row] == grid_.columns;
    }
    return touched;
}

std::optional<uint32_t> BlockMap::find(uint32_t count, Tag tag) const {
    if (count > free_blocks_) return std::nullopt;
    const uint32_t ends = 2 * (grid_.columns - 1);  // blocks that partly used rows can hold at the two ends
    const uint32_t unavoidable = count > ends ? (count - ends + grid_.columns - 1) / grid_.columns : 0;
    std::optional<uint32_t> best;
    uint32_t least = std::numeric_limits<uint32_t>::max();
    each_run_downwards(tag, [&](uint32_t first, uint32_t end) {
        if (end - first < count) return true;
        for (const uint32_t place : {end - count, first}) {
            const uint32_t touched = empty_rows_touched(place, count);
            if (touched >= least) continue;
            least = touched;
            best = place;
        }
        return least > unavoidable;
    });
    return best;
}

uint32_t BlockMap::longest_ready_run() const {
    uint32_t longest = 0;
    each_run_downwards(ready_tag, [&](uint32_t first, uint32_t end) {
        longest = std::max(longest, end - first);
        return true;
    });
    return longest;
}

void BlockMap::check_integrity() const {
    std::vector<uint32_t> row_free(grid_.rows);
    std::vector<uint32_t> row_ready(grid_.rows);
    for (uint32_t at = 0; at < grid_.blocks(); ++at) {
        const uint32_t row = at / grid_.columns;
        for (Tag tag = 0; tag < free_.size(); ++tag) {
            if (test_bit(free_[tag], at) != (tag_[at] == tag)) {
                throw StateError("tensor space: block " + std::to_string(at) + " is in the wrong bitmap");
            }
        }
        if (test_bit(open_, at) != open_row_[row] || (open_row_[row] && !held_[row]) || (is_free(at) && !held_[row])) {
            throw StateError("tensor space: block " + std::to_string(at) + " is open or free in a row that is not");
        }
        row_free[row] += is_free(at);
        row_ready[row] += tag_[at] == ready_tag;
    }
    size_t free_blocks = 0;
    size_t ready_blocks = 0;
    for (uint32_t row = 0; row < grid_.rows; ++row) {
        free_blocks += row_free[row];
        ready_blocks += row_ready[row];
    }
    if (row_free != row_free_ || row_ready != row_ready_ || free_blocks != free_blocks_ || ready_blocks != ready_blocks_) {
        throw StateError("tensor space: free or ready blocks are miscounted");
    }
}

}  // namespace harli
