#include "software_streams.hpp"

#include <utility>

namespace harli {

void SoftwareStreams::submit(Stream stream, std::function<void()> work) {
    std::lock_guard lock(mutex_);
    Queue& queue = queues_[stream];
    queue.waiting.push_back(std::move(work));
    ++queue.submitted;
    if (!queue.held) run(queue, queue.waiting.size());
}

void SoftwareStreams::hold(Stream stream) {
    std::lock_guard lock(mutex_);
    queues_[stream].held = true;
}

void SoftwareStreams::complete(Stream stream, uint64_t pieces) {
    std::lock_guard lock(mutex_);
    run(queues_[stream], pieces);
}

void SoftwareStreams::let_go(Stream stream) {
    std::lock_guard lock(mutex_);
    Queue& queue = queues_[stream];
    run(queue, queue.waiting.size());
    queue.held = false;
}

uint64_t SoftwareStreams::outstanding(Stream stream) const {
    std::lock_guard lock(mutex_);
    const auto found = queues_.find(stream);
    return found == queues_.end() ? 0 : found->second.submitted - found->second.completed;
}

Event SoftwareStreams::create_event() {
    std::lock_guard lock(mutex_);
    marks_.emplace(next_event_, Mark{});
    return next_event_++;
}

void SoftwareStreams::record(Event event, Stream stream) {
    std::lock_guard lock(mutex_);
    const auto found = marks_.find(event);
    if (found == marks_.end()) throw DriverError("driver call event_record failed: no such event");
    found->second = Mark{stream, queues_[stream].submitted};
}

bool SoftwareStreams::query(Event event) const {
    std::lock_guard lock(mutex_);
    const auto found = marks_.find(event);
    if (found == marks_.end()) throw DriverError("driver call event_query failed: no such event");
    const auto queue = queues_.find(found->second.stream);
    return queue == queues_.end() || queue->second.completed >= found->second.position;
}

void SoftwareStreams::destroy(Event event) {
    std::lock_guard lock(mutex_);
    if (marks_.erase(event) == 0) throw DriverError("driver call event_destroy failed: no such event");
}

uint64_t SoftwareStreams::events() const {
    std::lock_guard lock(mutex_);
    return marks_.size();
}

void SoftwareStreams::run(Queue& queue, uint64_t pieces) {
    for (; pieces > 0 && !queue.waiting.empty(); --pieces) {
        queue.waiting.front()();
        queue.waiting.pop_front();
        ++queue.completed;
    }
}

}  // namespace harli
