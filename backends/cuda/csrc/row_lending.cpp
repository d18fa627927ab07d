// How rows of the page pool change hands, and the fills of them that may still be under way.
#include <string>

#include "page_pool.hpp"

namespace harli {

// The new view is mapped before the old one goes, so that a failing map (the likely failure) leaves the old untouched.
void PagePool::move_row(uint32_t row, View from, View to) {
    bool was_there = false;  // after a fill that failed, see return_row: then it may be in use, and stays
    for (uint32_t column = 0; column < grid_.columns; ++column) was_there = was_there || block(row, column).mapped[to];
    try {
        map_row(to, row);
        unmap_row(from, row);
    } catch (...) {
        bool lost = refused([&] { map_row(from, row); });
        if (!was_there) lost = refused([&] { unmap_row(to, row); }) || lost;
        if (lost) {
            states_[row] = State::stranded;
            throw DriverError("row " + std::to_string(row) + " is stranded: a driver call failed, and so did undoing it");
        }
        throw;
    }
}

// Through the general-purpose view where it is mapped, since the row is one range there.
void PagePool::fill_row(uint32_t row, uint16_t pattern, Stream stream) {
    const View view = block(row, 0).mapped[general_view] ? general_view : kv_view;
    const Fence fence = fences_.now(fences_.tag_of(stream));
    const uint32_t pieces = view == general_view ? 1 : grid_.columns;
    for (uint32_t piece = 0; piece < pieces; ++piece) {
        driver_->fill(address(view, row, piece), pattern, grid_.row_bytes() / pieces, stream);
        fills_[row] = {fence, view};  // from the first piece on: a later one may fail while it runs
    }
    // An event close behind the fill. If there is none to be had, the next who asks about the fill tries again.
    refused([&] { fences_.poll(fills_[row].fence.tag); });
}

bool PagePool::fill_passed(uint32_t row) {
    const Fence fence = fills_[row].fence;
    if (!fences_.passed(fence)) fences_.poll(fence.tag);
    return fences_.passed(fence);
}

std::optional<Stream> PagePool::fill_under_way(uint32_t row) {
    bool passed = false;
    if (!refused([&] { passed = fill_passed(row); }) && passed) return std::nullopt;
    return fences_.stream_of(fills_[row].fence.tag);
}

void PagePool::lend_row(uint32_t row) {
    const auto locked = lock("lend a row");
    const Stopwatch watch(stats_.lend);
    State& state = checked_state("lend", row, State::kv);
    if (lending_ == Lending::remap) {
        if (!fill_passed(row)) {
            throw StateError("cannot lend row " + std::to_string(row) +
                             ": it is still being filled through the KV view; lend it after an event behind the fill");
        }
        move_row(row, kv_view, general_view);
    }
    state = State::lent;
    clean_[row] = false;
    watch.done();
}

std::optional<Stream> PagePool::hold_row(uint32_t row) {
    const auto locked = lock("hold a row");
    checked_state("hold", row, State::lent);
    if (held_[row]) throw StateError("cannot hold row " + std::to_string(row) + ": a tensor space holds it already");
    held_[row] = true;
    clean_[row] = false;
    return fill_under_way(row);
}

std::optional<Stream> PagePool::reuse_row(uint32_t row) {
    const auto locked = lock("reuse a row");
    checked_state("reuse", row, State::lent);
    clean_[row] = false;
    return fill_under_way(row);
}

void PagePool::let_row_go(uint32_t row) {
    const auto locked = lock("let a row go");
    held_[row] = false;
}

void PagePool::take_events_of(Fences& fences) {
    const auto locked = lock("take events");
    fences_.take_events_of(fences);
}

void PagePool::scrub_row(uint32_t row, uint16_t pattern, Stream stream, bool held) {
    const auto locked = lock("scrub a row");
    checked_state("scrub", row, State::lent);
    if (held_[row] != held) {
        throw StateError("cannot scrub row " + std::to_string(row) + ": a tensor space " +
                         (held ? "does not hold it" : "holds it, and scrubs it when it is empty"));
    }
    const Fence last = fills_[row].fence;
    if (last.tag != ready_tag && fences_.stream_of(last.tag) != stream && !fill_passed(row)) {
        throw StateError("cannot scrub row " + std::to_string(row) + ": it is still being filled on another stream");
    }
    fill_row(row, pattern, stream);
    clean_[row] = true;
}

void PagePool::return_row(uint32_t row, std::optional<uint16_t> pattern, Stream stream) {
    const auto locked = lock("return a row");
    const Stopwatch watch(stats_.give_back);
    State& state = checked_state("return", row, State::lent);
    if (held_[row]) throw StateError("cannot return row " + std::to_string(row) + ": a tensor space holds it");
    const Fill& last = fills_[row];
    const bool unmapped = lending_ == Lending::remap && last.view == general_view;
    const bool in_order = last.fence.tag == ready_tag || (!unmapped && fences_.stream_of(last.fence.tag) == stream);
    if (!in_order && !fill_passed(row)) {
        throw StateError("cannot return row " + std::to_string(row) +
                         ": its scrub has not passed; return it after an event behind the scrub");
    }
    const bool fill = pattern.has_value() && !clean_[row];
    if (lending_ == Lending::alias) {
        if (fill) fill_row(row, *pattern, stream);
    } else {
        move_row(row, general_view, kv_view);
        try {
            if (fill) fill_row(row, *pattern, stream);
        } catch (...) {
            // Fills may be under way through the KV view, so it stays mapped: the row is lent again with both views,
            // and the next attempt goes on from there.
            if (refused([&] { map_row(general_view, row); })) state = State::stranded;
            throw;
        }
    }
    state = State::kv;
    clean_[row] = false;
    watch.done();
}

}  // namespace harli
