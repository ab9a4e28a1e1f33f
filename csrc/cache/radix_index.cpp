#include "cache/radix_index.hpp"

#include <algorithm>

#include "cache/bug.hpp"

namespace pagemill::cache {

RadixIndex::RadixIndex(const FlatIndex &rows, uint32_t num_blocks, uint32_t block_size)
    : rows_(rows), block_size_(block_size), node_of_(num_blocks) {}

size_t RadixIndex::num_bytes() const {
    size_t sum = node_of_.num_bytes() + nodes_.capacity() * sizeof(Node) +
                 unused_.capacity() * sizeof(NodeId) + children_.num_bytes();
    for (const Node &node : nodes_) sum += node.blocks.num_bytes_outside();
    return sum + roots_.size() * 2 * (sizeof(Hash) + 2 * sizeof(void *));
}

// ---- nodes ----------------------------------------------------------------------------------

NodeId RadixIndex::new_node() {
    ++num_nodes_;
    if (unused_.empty()) {
        const size_t size = nodes_.size();
        if (size == nodes_.capacity()) nodes_.reserve(size + size / 4 + 1);
        nodes_.emplace_back();
        return NodeId(nodes_.size() - 1);
    }
    NodeId id = unused_.back();
    unused_.pop_back();
    return id;
}

// An empty tree gives back what it grew to. Until then an unused node keeps room for a few blocks.
void RadixIndex::free_node(NodeId id) {
    BlockRun blocks = std::move(nodes_[id].blocks);
    nodes_[id] = Node{};
    blocks.clear();
    nodes_[id].blocks = std::move(blocks);
    unused_.push_back(id);
    if (--num_nodes_ > 0) return;
    nodes_ = std::vector<Node>(1);
    unused_ = std::vector<NodeId>();
    children_.clear();
    roots_ = {};
    root_hash_ = {};
}

NodeId RadixIndex::root_node(const Hash &root) {
    auto found = roots_.find(root);
    if (found != roots_.end()) return found->second;
    NodeId id = new_node();
    roots_.emplace(root, id);
    root_hash_.emplace(id, root);
    return id;
}

void RadixIndex::attach(NodeId parent_id, NodeId child_id) {
    Node &parent = nodes_[parent_id], &child = nodes_[child_id];
    child.parent = parent_id;
    child.prev = kNoNode;
    child.next = parent.first_child;
    if (child.next != kNoNode) nodes_[child.next].prev = child_id;
    parent.first_child = child_id;
    children_.insert(parent_id, child.first_token, child_id);
}

void RadixIndex::detach(NodeId child_id) {
    Node &child = nodes_[child_id], &parent = nodes_[child.parent];
    if (child.next != kNoNode) nodes_[child.next].prev = child.prev;
    (child.prev != kNoNode ? nodes_[child.prev].next : parent.first_child) = child.next;
    children_.erase(child.parent, child.first_token, child_id);
}

// ---- looking --------------------------------------------------------------------------------

// Block j as this node has it: its own, or, behind its last whole block, that of any child.
BlockId RadixIndex::block_at(NodeId id, uint32_t j) const {
    while (j - first_block(node(id)) >= node(id).blocks.size()) id = node(id).first_child;
    return node(id).blocks[j - first_block(node(id))];
}

// How far the node's run agrees with the tokens, from a depth up to which it does.
uint32_t RadixIndex::common(NodeId id, uint32_t depth, const Tokens &tokens) const {
    const Node &run = node(id);
    const uint32_t size = block_size_, end = std::min(run.end, tokens.end);
    constexpr size_t kAhead = 12;
    while (depth < end) {
        const uint32_t j = depth / size, stop = std::min(end, (j + 1) * size);
        const size_t ahead = j - first_block(run) + kAhead;
        if (ahead < run.blocks.size()) __builtin_prefetch(rows_.token_ids(run.blocks[ahead]));
        const uint32_t *row = rows_.token_ids(block_at(id, j)) + depth % size;
        const uint32_t *asked = tokens.data + (depth - tokens.first);
        if (std::memcmp(row, asked, (stop - depth) * sizeof(uint32_t)) != 0)
            return depth + uint32_t(std::mismatch(row, row + (stop - depth), asked).first - row);
        depth = stop;
    }
    return depth;
}

RadixIndex::Spot RadixIndex::walk(Spot spot, const Tokens &tokens) const {
    for (;;) {
        spot.depth = common(spot.node, spot.depth, tokens);
        if (spot.depth < node(spot.node).end || spot.depth == tokens.end) return spot;
        NodeId child = find_child(spot.node, tokens[spot.depth]);
        if (child == kNoNode) return spot;
        spot.node = child;
    }
}

// The first num_blocks blocks of the path to this node.
void RadixIndex::collect(NodeId id, uint32_t num_blocks, std::vector<BlockId> &blocks) const {
    blocks.resize(num_blocks);
    for (; id != kNoNode; id = node(id).parent) {
        const uint32_t first = first_block(node(id));
        if (first >= num_blocks) continue;
        const size_t count = std::min<size_t>(node(id).blocks.size(), num_blocks - first);
        std::copy_n(node(id).blocks.begin(), count, blocks.begin() + first);
    }
}

uint32_t RadixIndex::match(const Hash &root, const uint32_t *tokens, uint32_t n,
                           std::vector<BlockId> &blocks) const {
    auto found = roots_.find(root);
    if (found == roots_.end()) return 0;
    const Spot spot = walk({found->second, 0}, {tokens, 0, n});
    collect(spot.node, spot.depth / block_size_, blocks);
    if (spot.depth % block_size_) blocks.push_back(block_at(spot.node, spot.depth / block_size_));
    return spot.depth;
}

// Children before their parents.
std::vector<BlockId> RadixIndex::subtree(NodeId id) const {
    std::vector<BlockId> out;
    std::vector<NodeId> left{id};
    while (!left.empty()) {
        const Node &run = node(left.back());
        left.pop_back();
        out.insert(out.end(), run.blocks.begin(), run.blocks.end());
        for (NodeId child = run.first_child; child != kNoNode; child = node(child).next)
            left.push_back(child);
    }
    std::reverse(out.begin(), out.end());
    return out;
}

std::vector<BlockId> RadixIndex::blocks_under(const Hash &root) const {
    auto found = roots_.find(root);
    return found == roots_.end() ? std::vector<BlockId>{} : subtree(found->second);
}

std::vector<BlockId> RadixIndex::blocks_behind(const Hash &root, const uint32_t *tokens,
                                               uint32_t n) const {
    auto found = roots_.find(root);
    if (found == roots_.end()) return {};
    const Spot spot = walk({found->second, 0}, {tokens, 0, n});
    if (spot.depth < n) return {};
    std::vector<BlockId> out = subtree(spot.node);
    // the node's own blocks before the spot, first in its run and so last here, stay out
    const uint32_t first = first_block(node(spot.node)), num_whole = n / block_size_;
    out.resize(out.size() - std::min<size_t>(num_whole > first ? num_whole - first : 0,
                                             node(spot.node).blocks.size()));
    return out;
}

bool RadixIndex::is_last(BlockId block) const {
    const Node &run = node(node_of_[block]);
    return run.first_child == kNoNode && run.blocks.back() == block;
}

// ---- changing -------------------------------------------------------------------------------

//     parent --[start .......... end)-- children
//     parent --[start .. depth)--[depth .. end)-- children
// The lower part keeps the node's id, so that its children need not be told. Returns the upper.
NodeId RadixIndex::split(NodeId id, uint32_t depth) {
    const uint32_t token = rows_.token_ids(block_at(id, depth / block_size_))[depth % block_size_];
    const NodeId upper_id = new_node(), parent = node(id).parent;
    detach(id);
    Node &upper = nodes_[upper_id], &lower = nodes_[id];
    const uint32_t num_upper = depth / block_size_ - first_block(lower);
    upper.blocks.insert_front({lower.blocks.begin(), num_upper});
    lower.blocks.erase_front(num_upper);
    for (BlockId block : upper.blocks) node_of_[block] = upper_id;
    upper.start = lower.start;
    upper.end = lower.start = depth;
    upper.first_token = lower.first_token;
    lower.first_token = token;
    attach(parent, upper_id);
    attach(upper_id, id);
    return upper_id;
}

// The way back, when a node has one child left: the child's run begins where the node's did.
void RadixIndex::merge_into_child(NodeId id) {
    const NodeId child_id = node(id).first_child, parent = node(id).parent;
    detach(child_id);
    detach(id);
    Node &upper = nodes_[id], &child = nodes_[child_id];
    child.blocks.insert_front({upper.blocks.begin(), upper.blocks.size()});
    for (BlockId block : upper.blocks) node_of_[block] = child_id;
    child.start = upper.start;
    child.first_token = upper.first_token;
    free_node(id);
    attach(parent, child_id);
}

// A leaf goes on; a tail at its end is displaced.
BlockId RadixIndex::grow(NodeId id, BlockId block, uint32_t end) {
    Node &leaf = nodes_[id];
    BlockId displaced = kNullBlock;
    if (leaf.end % block_size_) {
        displaced = leaf.blocks.back();
        node_of_[displaced] = kNoNode;
        leaf.blocks.pop_back();
    }
    leaf.blocks.push_back(block);
    leaf.end = end;
    node_of_[block] = id;
    return displaced;
}

RadixIndex::Insertion RadixIndex::insert(BlockId block, BlockId before, const Hash &root,
                                         uint32_t j, const uint32_t *tokens, uint32_t count) {
    const uint32_t first = j * block_size_;
    const Tokens added{tokens, first, first + count};
    if (contains(block)) bug("radix index: block " + std::to_string(block) + " is in it already");
    const NodeId from = before == kNullBlock ? root_node(root) : node_of_[before];
    if (from == kNoNode) bug("radix index: the block before is not in it");
    Spot spot = walk({from, first}, added);
    if (spot.depth == added.end) return {false, kNullBlock};
    if (spot.depth < node(spot.node).end) {
        spot.node = split(spot.node, spot.depth);
    } else if (!has_children(spot.node) && !is_root(spot.node)) {
        return {true, grow(spot.node, block, added.end)};
    }
    const NodeId leaf = new_node();
    nodes_[leaf].start = spot.depth;
    nodes_[leaf].first_token = added[spot.depth];
    grow(leaf, block, added.end);
    attach(spot.node, leaf);
    return {true, kNullBlock};
}

void RadixIndex::prefetch_node(BlockId block) const {
    const Node &leaf = node(node_of_[block]);
    __builtin_prefetch(&leaf);
}

void RadixIndex::prefetch_links(BlockId block) const {
    const Node &leaf = node(node_of_[block]);
    __builtin_prefetch(leaf.blocks.begin());
    if (leaf.blocks.size() > 1) return;  // the node stays
    __builtin_prefetch(&node(leaf.next).prev);
    __builtin_prefetch(&node(leaf.prev).next);
    children_.prefetch(leaf.parent, leaf.first_token);
}

void RadixIndex::remove(BlockId block) {
    if (!contains(block) || !is_last(block))
        bug("radix index: block " + std::to_string(block) + " is not the last of a leaf");
    const NodeId id = node_of_[block];
    node_of_[block] = kNoNode;
    nodes_[id].blocks.pop_back();
    prune(id);
}

// A run without children ends with its last block, and a node without a run goes.
void RadixIndex::prune(NodeId id) {
    while (!is_root(id) && !has_children(id)) {
        Node &leaf = nodes_[id];
        leaf.end = std::min<uint32_t>(
            leaf.end, (first_block(leaf) + uint32_t(leaf.blocks.size())) * block_size_);
        if (leaf.end > leaf.start) return;
        const NodeId parent = leaf.parent;
        detach(id);
        free_node(id);
        id = parent;
    }
    if (!is_root(id)) {
        if (has_one_child(id)) merge_into_child(id);
    } else if (!has_children(id)) {
        auto hash = root_hash_.find(id);
        roots_.erase(hash->second);
        root_hash_.erase(hash);
        free_node(id);
    }
}

void RadixIndex::replace(BlockId from, BlockId to) {
    if (!contains(from)) bug("radix index: block " + std::to_string(from) + " is not in it");
    BlockRun &blocks = nodes_[node_of_[from]].blocks;
    BlockId *at = blocks.end();
    while (*--at != from) {}
    *at = to;
    node_of_[to] = node_of_[from];
    node_of_[from] = kNoNode;
}

void RadixIndex::swap(BlockId a, BlockId b) {
    BlockRun &first = nodes_[node_of_[a]].blocks, &second = nodes_[node_of_[b]].blocks;
    const auto at_a = std::find(first.begin(), first.end(), a);
    const auto at_b = std::find(second.begin(), second.end(), b);
    std::iter_swap(at_a, at_b);
    std::swap(node_of_[a], node_of_[b]);
}

// ---- checking -------------------------------------------------------------------------------

std::optional<std::string> RadixIndex::check(uint32_t num_blocks) const {
    std::vector<bool> is_unused(nodes_.size());
    for (NodeId id : unused_) is_unused[id] = true;
    uint32_t count = 0, num_seen = 0;
    for (NodeId id = 1; id < nodes_.size(); ++id) {
        if (is_unused[id]) continue;
        ++num_seen;
        count += uint32_t(node(id).blocks.size());
        if (auto words = check_node(id)) return "node " + std::to_string(id) + ": " + *words;
    }
    if (num_seen != num_nodes_) return "nodes are lost";
    if (count != num_blocks) return "the tree has not the blocks that are cached";
    return {};
}

std::optional<std::string> RadixIndex::check_node(NodeId id) const {
    const Node &run = node(id);
    for (NodeId child = run.first_child; child != kNoNode; child = node(child).next)
        if (node(child).parent != id || node(child).start != run.end ||
            find_child(id, node(child).first_token) != child)
            return "a child does not go on where it ends";
    for (BlockId block : run.blocks)
        if (node_of_[block] != id) return "one of its blocks names another node";
    if (!is_root(id)) return check_run(id);
    if (!has_children(id) || run.end) return "an idle root";
    return {};
}

std::optional<std::string> RadixIndex::check_run(NodeId id) const {
    const Node &run = node(id);
    if (run.end <= run.start || has_one_child(id)) return "it is no run of its own";
    const uint32_t end_block = has_children(id) ? run.end / block_size_
                                                : (run.end + block_size_ - 1) / block_size_;
    if (run.blocks.size() != end_block - first_block(run)) return "it does not own its blocks";
    const uint32_t *row = rows_.token_ids(block_at(id, first_block(run)));
    if (row[run.start % block_size_] != run.first_token) return "its first token is another";
    const uint32_t shared = run.start % block_size_;
    if (shared == 0) return {};
    const uint32_t *above = rows_.token_ids(block_at(run.parent, first_block(run)));
    if (std::memcmp(row, above, shared * sizeof(uint32_t)) != 0)
        return "its first block does not begin with its parent's tokens";
    return {};
}

}  // namespace pagemill::cache
