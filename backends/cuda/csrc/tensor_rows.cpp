// The rows of a tensor space: how they come, close, open and go.
#include <string>

#include "tensor_space.hpp"

namespace harli {

void TensorSpace::check_row(uint32_t row, const char* verb) const {
    if (row >= pool_->grid().rows || !blocks_.holds(row)) {
        throw StateError(std::string("cannot ") + verb + " row " + std::to_string(row) + ": the tensor space does not hold it");
    }
}

// The pool is asked first, without this lock: it may be busy with the driver for milliseconds.
void TensorSpace::add_row(uint32_t row) {
    const auto filled_on = pool_->hold_row(row);
    try {
        const auto locked = lock("add a row");
        blocks_.add_row(row, fence_behind(filled_on));
    } catch (...) {
        pool_->let_row_go(row);
        throw;
    }
}

Fence TensorSpace::fence_behind(std::optional<Stream> stream) {
    return stream ? fences_.now(fences_.tag_of(*stream)) : Fence{};
}

void TensorSpace::set_row_open(uint32_t row, bool open) {
    open ? blocks_.open_row(row) : blocks_.close_row(row);
    for (uint32_t block = row * columns_; block < (row + 1) * columns_; ++block) {
        if (slab_of_[block] != no_slab) granules_.set_open(slab_of_[block], open);
    }
}

void TensorSpace::close_row(uint32_t row) {
    const auto locked = lock("close a row");
    check_row(row, "close");
    set_row_open(row, false);
}

void TensorSpace::open_row(uint32_t row) {
    const auto locked = lock("open a row");
    check_row(row, "open");
    if (blocks_.is_open(row)) return;
    const auto filled_on = pool_->reuse_row(row);
    // A scrub found it empty. Whatever else filled the row, its blocks have been behind that since they were added.
    if (filled_on && blocks_.ready_in(row) == columns_) blocks_.refence_row(row, fence_behind(filled_on));
    set_row_open(row, true);
}

void TensorSpace::scrub_row(uint32_t row, uint16_t pattern, Stream stream) {
    const auto locked = lock("scrub a row");
    check_row(row, "scrub");
    check_empty(row, "scrub");
    pool_->scrub_row(row, pattern, stream, true);
    set_row_open(row, false);
}

void TensorSpace::remove_row(uint32_t row) {
    const auto locked = lock("remove a row");
    check_row(row, "remove");
    check_empty(row, "remove");
    blocks_.remove_row(row);
    pool_->let_row_go(row);
}

void TensorSpace::check_empty(uint32_t row, const char* verb) const {
    if (blocks_.ready_in(row) == columns_) return;
    throw StateError(std::string("cannot ") + verb + " row " + std::to_string(row) + " of the tensor space: " +
                     std::to_string(columns_ - blocks_.free_in(row)) + " of its blocks are in use, " +
                     std::to_string(blocks_.free_in(row) - blocks_.ready_in(row)) + " wait for a fence");
}

bool TensorSpace::holds_row(uint32_t row) const {
    const auto locked = lock("look at a row");
    return row < pool_->grid().rows && blocks_.holds(row);
}

template <typename Wanted>
std::vector<uint32_t> TensorSpace::rows_where(Wanted&& wanted) const {
    const auto locked = lock("look at rows");
    std::vector<uint32_t> found;
    for (uint32_t row = 0; row < pool_->grid().rows; ++row) {
        if (blocks_.holds(row) && wanted(row)) found.push_back(row);
    }
    return found;
}

std::vector<uint32_t> TensorSpace::rows() const {
    return rows_where([](uint32_t) { return true; });
}

std::vector<uint32_t> TensorSpace::rows_open() const {
    return rows_where([this](uint32_t row) { return blocks_.is_open(row); });
}

std::vector<uint32_t> TensorSpace::rows_empty() const {
    return rows_where([this](uint32_t row) { return blocks_.ready_in(row) == columns_; });
}

std::vector<uint32_t> TensorSpace::rows_idle() const {
    return rows_where([this](uint32_t row) { return live_in_row_[row] == 0; });
}

std::vector<uint32_t> TensorSpace::lowest_idle_rows(uint32_t count) const {
    const auto locked = lock("look at rows");
    std::vector<uint32_t> found;
    for (uint32_t row = 0; row < pool_->grid().rows && found.size() < count; ++row) {
        if (blocks_.is_open(row) && live_in_row_[row] == 0) found.push_back(row);
    }
    return found;
}

bool TensorSpace::row_empty(uint32_t row) const {
    const auto locked = lock("look at a row");
    return row < pool_->grid().rows && blocks_.holds(row) && blocks_.ready_in(row) == columns_;
}

bool TensorSpace::row_open(uint32_t row) const {
    const auto locked = lock("look at a row");
    return row < pool_->grid().rows && blocks_.is_open(row);
}

}  // namespace harli
