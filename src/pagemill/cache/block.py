"""The life of a block. No code here: this page is what the compiled pool must keep to.

States, and the call of ``CacheManager`` that moves a block from one to the next:

    from            to              by
    EMPTY           HELD            extend
    HELD            HELD + hash     commit: its last token is computed; from now on findable and
                                    never written again
    HELD            EMPTY           the last release, never published
    HELD            EVICTABLE tail  the same, radix index: partly filled, in the tree, no hash; a
                                    taker copies it, a run that goes on from it displaces it
    HELD + hash     EVICTABLE       the last release, tail of a table first
    EVICTABLE       HELD + hash     open, of a match
    EVICTABLE       EMPTY           extend or evict: index entry dropped, event written
    HELD, ref > 1,  a second HELD   extend, before the block is written: a BlockCopy of the plan
    or cached

Two blocks of the same content. Two sequences that compute the same tokens at the same time fill two
blocks with them. They are not merged: a table that a running step reads must not change under it.
One of them is published; the other is held as its *duplicate*, and takes no part in matches.

    commit, the published one is EVICTABLE     the new block takes over the entry; the old is EMPTY
    commit, the published one is HELD          the new block becomes a duplicate
    last release of the published one          its oldest duplicate takes over the entry
    last release of a duplicate                EMPTY

The hash stays findable throughout, so no event is written. Because of this a table holds, for each
of its published blocks, that block or a twin of it; and it releases its tail first. So a parent is
never older in the evictable list than its children: the oldest evictable block of a full group is
always a leaf, and the cached set stays prefix-closed without counting children.

When a full block is not published. (a) Others hold it too: a fork made while a step was running
sees it as partly filled, or it is the source of a copy. It waits for a later commit. (b) Its hash
belongs to a block of other content: counted, and its table publishes nothing from there on.

Invariants that ``check_integrity`` walks (numbers of docs/design.md):

1. empty + evictable + held (+ the null block) = pool.
2. ref count = tables that hold the block + copies that read it.
3. The cached set of a full group is prefix-closed, and no parent is evicted before a child.
4. A block that will be written is neither published nor shared.
5. Index entry <-> published block, both ways; its tokens hash to its key.
"""
