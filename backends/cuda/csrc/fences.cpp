#include "fences.hpp"

#include <utility>

namespace harli {

size_t Fences::drop_events() noexcept {
    if (!driver_->at_home()) return 0;  // a forked child: they are its parent's
    for (Line& line : lines_) {
        for (; !line.closing.empty(); line.closing.pop_front()) spare_.push_back(line.closing.front().event);
    }
    std::erase_if(spare_, [this](Event event) {
        try {
            driver_->destroy(event);
            return true;
        } catch (const std::exception&) {
            return false;
        }
    });
    return spare_.size();
}

void Fences::take_events_of(Fences& other) {
    spare_.insert(spare_.end(), other.spare_.begin(), other.spare_.end());
    other.spare_.clear();
}

Tag Fences::tag_of(Stream stream) {
    if (last_ <= lines_.size() && lines_[last_ - 1].stream == stream) return last_;
    for (Tag tag = 1; tag <= lines_.size(); ++tag) {
        if (lines_[tag - 1].stream == stream) return last_ = tag;
    }
    lines_.emplace_back();
    lines_.back().stream = stream;
    return last_ = static_cast<Tag>(lines_.size());
}

Fence Fences::now(Tag tag) {
    Line& line = lines_[tag - 1];
    line.wanted = true;
    return {tag, line.open};
}

bool Fences::poll(Tag tag) {
    Line& line = lines_[tag - 1];
    if (line.wanted) {
        if (spare_.empty()) spare_.push_back(driver_->create_event());
        driver_->record(spare_.back(), line.stream);
        line.closing.push_back({spare_.back(), line.open});
        spare_.pop_back();
        ++line.open;
        line.wanted = false;
    }
    while (!line.closing.empty() && driver_->query(line.closing.front().event)) {
        line.passed = line.closing.front().epoch;
        spare_.push_back(line.closing.front().event);
        line.closing.pop_front();
    }
    return std::exchange(line.told, line.passed) != line.passed;
}

}  // namespace harli
