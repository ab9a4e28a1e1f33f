// A tree of token runs over the published blocks and the cached tails of one full group.
//
//     root --[0 ......... 37)--+--[37 ...... 96)      a run ends where sequences part, at the token
//                              +--[37 .. 41)          a tail: 41 is not on a block border
//
// Depths are token positions of the chain. A node owns the blocks whose last token lies in its run,
// so where runs part inside a block each child owns a whole block, which begins with tokens of its
// parent's run.
//
// 1. Children of a node differ in their first token; a node with one child is a root.
// 2. blocks[i] is block start / B + i of the chain. A leaf owns all blocks that its run touches. An
//    inner node owns up to floor(end / B); what is behind stands in the first block of each child.
// 3. Only a leaf ends in a tail: a block of less than B tokens, never published.
// 4. A run that goes on with the tokens of a tail displaces it.
#pragma once

#include <cstring>
#include <optional>
#include <unordered_map>
#include <vector>

#include "cache/block_run.hpp"
#include "cache/child_table.hpp"
#include "cache/flat_index.hpp"

namespace pagemill::cache {

class RadixIndex {
public:
    struct Insertion {
        bool is_new;        // false: other blocks hold these tokens already
        BlockId displaced;  // a tail that is no longer in the tree, or kNullBlock
    };

    // Token ids of a block are those that `rows` keeps for it.
    RadixIndex(const FlatIndex &rows, uint32_t num_blocks, uint32_t block_size);

    bool contains(BlockId block) const { return node_of_[block] != kNoNode; }
    uint32_t num_nodes() const { return num_nodes_; }
    size_t num_bytes() const;

    // The longest common prefix of tokens [0, n) with what is cached under the root. `blocks`: its
    // full blocks, then, when it ends inside a block, one that begins with the rest.
    uint32_t match(const Hash &root, const uint32_t *tokens, uint32_t n,
                   std::vector<BlockId> &blocks) const;

    // Block j of a chain, with its first `count` tokens. `before`: block j - 1, or kNullBlock; then
    // `root` names the chain.
    Insertion insert(BlockId block, BlockId before, const Hash &root, uint32_t j,
                     const uint32_t *tokens, uint32_t count);
    // The last block of a leaf.
    void remove(BlockId block);
    // `to` takes the place of `from`: same tokens.
    void replace(BlockId from, BlockId to);
    void swap(BlockId a, BlockId b);  // for tests

    // This block will be removed soon: what leads to its node, the node, and what it leads to, each
    // to be called when the one before has had time.
    void prefetch_place(BlockId block) const { __builtin_prefetch(&node_of_[block]); }
    void prefetch_node(BlockId block) const;
    void prefetch_links(BlockId block) const;
    // All blocks under the root, children before their parents.
    std::vector<BlockId> blocks_under(const Hash &root) const;
    // Those of chains that begin with all of tokens [0, n): beyond the whole blocks of these.
    std::vector<BlockId> blocks_behind(const Hash &root, const uint32_t *tokens, uint32_t n) const;
    // The block's path has no other block behind it.
    bool is_last(BlockId block) const;
    // What is wrong with the tree, if anything; num_blocks: those that should be in it.
    std::optional<std::string> check(uint32_t num_blocks) const;

private:
    struct Node {
        NodeId parent = kNoNode, first_child = kNoNode, next = kNoNode, prev = kNoNode;
        uint32_t start = 0, end = 0, first_token = 0;
        BlockRun blocks;
    };
    struct HashOfRoot {
        size_t operator()(const Hash &hash) const {
            size_t bits;
            std::memcpy(&bits, hash.data(), sizeof bits);
            return bits;
        }
    };
    struct Spot {  // depth lies in the node's run, or at its end
        NodeId node;
        uint32_t depth;
    };
    struct Tokens {  // the tokens of the depths [first, end)
        const uint32_t *data;
        uint32_t first, end;
        uint32_t operator[](uint32_t depth) const { return data[depth - first]; }
    };

    const FlatIndex &rows_;
    uint32_t block_size_, num_nodes_ = 0;
    Zeroed<NodeId> node_of_;
    std::vector<Node> nodes_ = std::vector<Node>(1);
    std::vector<NodeId> unused_;
    ChildTable children_;
    std::unordered_map<Hash, NodeId, HashOfRoot> roots_;
    std::unordered_map<NodeId, Hash> root_hash_;

    const Node &node(NodeId id) const { return nodes_[id]; }
    uint32_t first_block(const Node &node) const { return node.start / block_size_; }
    bool is_root(NodeId id) const { return nodes_[id].parent == kNoNode; }
    bool has_children(NodeId id) const { return nodes_[id].first_child != kNoNode; }
    bool has_one_child(NodeId id) const {
        return has_children(id) && nodes_[nodes_[id].first_child].next == kNoNode;
    }
    NodeId find_child(NodeId parent, uint32_t token) const {
        return children_.find(parent, token, [&](NodeId child) {
            return nodes_[child].parent == parent && nodes_[child].first_token == token;
        });
    }

    NodeId new_node();
    void free_node(NodeId id);
    NodeId root_node(const Hash &root);
    void attach(NodeId parent, NodeId child);
    void detach(NodeId child);

    BlockId block_at(NodeId id, uint32_t j) const;
    uint32_t common(NodeId id, uint32_t depth, const Tokens &tokens) const;
    Spot walk(Spot spot, const Tokens &tokens) const;
    std::vector<BlockId> subtree(NodeId id) const;
    void collect(NodeId id, uint32_t num_blocks, std::vector<BlockId> &blocks) const;

    NodeId split(NodeId id, uint32_t depth);
    void merge_into_child(NodeId id);
    void prune(NodeId id);
    BlockId grow(NodeId id, BlockId block, uint32_t end);
    std::optional<std::string> check_node(NodeId id) const;
    std::optional<std::string> check_run(NodeId id) const;
};

}  // namespace pagemill::cache
