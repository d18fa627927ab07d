#include "fences.hpp"

namespace harli {

Fences::~Fences() {
    for (const Line& line : lines_) {
        for (const Closing& it : line.closing) spare_.push_back(it.event);
    }
    for (const Event event : spare_) {
        try {
            driver_->destroy(event);
        } catch (const std::exception&) {  // nothing is left to be done about it
        }
    }
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
    const uint64_t before = line.passed;
    while (!line.closing.empty() && driver_->query(line.closing.front().event)) {
        line.passed = line.closing.front().epoch;
        spare_.push_back(line.closing.front().event);
        line.closing.pop_front();
    }
    return line.passed != before;
}

}  // namespace harli
