//! Which bytes of a region are free: best fit with coalescing, on offsets alone.

use std::collections::{BTreeMap, BTreeSet};

/// A run of bytes in a region.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Extent {
    /// Distance from the start of the region, in bytes.
    pub offset: u64,
    /// Size in bytes.
    pub len: u64,
}

/// The free extents of a region, each as large as its neighbours allow.
#[derive(Debug, Clone)]
pub struct Extents {
    capacity: u64,
    alignment: u64,
    len_at: BTreeMap<u64, u64>,
    by_len: BTreeSet<(u64, u64)>,
}

impl Extents {
    /// An empty region. Its capacity is rounded down to the alignment, sizes asked for are rounded up.
    pub fn new(capacity: u64, alignment: u64) -> Self {
        let capacity = capacity - capacity % alignment;
        let mut extents = Self {
            capacity,
            alignment,
            len_at: BTreeMap::new(),
            by_len: BTreeSet::new(),
        };
        if capacity > 0 {
            extents.insert(Extent {
                offset: 0,
                len: capacity,
            });
        }
        extents
    }

    /// Bytes in the region.
    pub fn capacity(&self) -> u64 {
        self.capacity
    }

    /// Bytes an allocation of `len` takes; `None` beyond what 64 bits can count.
    pub fn rounded(&self, len: u64) -> Option<u64> {
        len.max(1).checked_next_multiple_of(self.alignment)
    }

    /// Free bytes, summed over the list of extents.
    pub fn free_bytes(&self) -> u64 {
        self.len_at.values().sum()
    }

    /// The free extents in order of offset.
    pub fn iter(&self) -> impl Iterator<Item = Extent> + '_ {
        self.len_at
            .iter()
            .map(|(&offset, &len)| Extent { offset, len })
    }

    /// Takes the smallest free extent that holds `len` bytes, the lowest of equals; `None` when none does.
    pub fn alloc(&mut self, len: u64) -> Option<Extent> {
        let len = self.rounded(len)?;
        let &(found_len, offset) = self.by_len.range((len, 0)..).next()?;
        self.remove(Extent {
            offset,
            len: found_len,
        });
        if found_len > len {
            self.insert(Extent {
                offset: offset + len,
                len: found_len - len,
            });
        }
        Some(Extent { offset, len })
    }

    /// Gives an extent back and joins it with its free neighbours.
    ///
    /// # Panics
    /// If any byte of it is free already or lies outside the region: the caller's books are corrupt, and
    /// going on would hand one byte to two owners.
    pub fn free(&mut self, extent: Extent) {
        let Extent {
            mut offset,
            mut len,
        } = extent;
        let end = offset + len;
        assert!(
            len > 0 && end <= self.capacity,
            "corrupt extent list: freeing {extent:?}"
        );
        let before = self.len_at.range(..offset).next_back();
        if let Some((&before_offset, &before_len)) = before {
            assert!(
                before_offset + before_len <= offset,
                "corrupt extent list: double free of {extent:?}"
            );
            if before_offset + before_len == offset {
                self.remove(Extent {
                    offset: before_offset,
                    len: before_len,
                });
                offset = before_offset;
                len += before_len;
            }
        }
        if let Some((&after_offset, &after_len)) = self.len_at.range(extent.offset..).next() {
            assert!(
                end <= after_offset,
                "corrupt extent list: double free of {extent:?}"
            );
            if end == after_offset {
                self.remove(Extent {
                    offset: after_offset,
                    len: after_len,
                });
                len += after_len;
            }
        }
        self.insert(Extent { offset, len });
    }

    /// Takes exactly these bytes, which must be free: undoes a [`Extents::free`].
    ///
    /// # Panics
    /// If any byte of it is not free.
    pub fn claim(&mut self, extent: Extent) {
        let (&offset, &len) = self
            .len_at
            .range(..=extent.offset)
            .next_back()
            .expect("corrupt extent list: claiming bytes that are not free");
        let (end, claimed_end) = (offset + len, extent.offset + extent.len);
        assert!(
            claimed_end <= end,
            "corrupt extent list: claiming {extent:?}"
        );
        self.remove(Extent { offset, len });
        if offset < extent.offset {
            self.insert(Extent {
                offset,
                len: extent.offset - offset,
            });
        }
        if claimed_end < end {
            self.insert(Extent {
                offset: claimed_end,
                len: end - claimed_end,
            });
        }
    }

    fn insert(&mut self, extent: Extent) {
        self.len_at.insert(extent.offset, extent.len);
        self.by_len.insert((extent.len, extent.offset));
    }

    fn remove(&mut self, extent: Extent) {
        self.len_at.remove(&extent.offset);
        self.by_len.remove(&(extent.len, extent.offset));
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// One flag a byte: the allocator as a child would write it.
    struct Model {
        used: Vec<bool>,
    }

    impl Model {
        fn best_fit(&self, len: usize) -> Option<usize> {
            let mut best: Option<(usize, usize)> = None;
            let mut at = 0;
            while at < self.used.len() {
                let run = self.used[at..].iter().take_while(|used| !**used).count();
                if run >= len && best.is_none_or(|(best_run, _)| run < best_run) {
                    best = Some((run, at));
                }
                at += run.max(1);
            }
            best.map(|(_, at)| at)
        }

        fn set(&mut self, extent: Extent, used: bool) {
            let range = extent.offset as usize..(extent.offset + extent.len) as usize;
            for byte in &mut self.used[range] {
                assert_ne!(*byte, used);
                *byte = used;
            }
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(400))]
        #[test]
        fn equals_the_naive_model(
            capacity in 1u64..200,
            steps in proptest::collection::vec((any::<bool>(), 1u64..40, any::<usize>()), 1..200),
        ) {
            let mut extents = Extents::new(capacity, 1);
            let mut model = Model { used: vec![false; capacity as usize] };
            let mut held: Vec<Extent> = Vec::new();
            for (take, len, pick) in steps {
                if take {
                    let got = extents.alloc(len);
                    prop_assert_eq!(got.map(|extent| extent.offset as usize), model.best_fit(len as usize));
                    if let Some(extent) = got {
                        prop_assert_eq!(extent.len, len);
                        model.set(extent, true);
                        held.push(extent);
                    }
                } else if !held.is_empty() {
                    let extent = held.swap_remove(pick % held.len());
                    extents.free(extent);
                    if pick % 3 == 0 {
                        extents.claim(extent);
                        held.push(extent);
                    } else {
                        model.set(extent, false);
                    }
                }
                let free = model.used.iter().filter(|used| !**used).count();
                prop_assert_eq!(extents.free_bytes(), free as u64);
                let list: Vec<Extent> = extents.iter().collect();
                prop_assert!(list.windows(2).all(|pair| pair[0].offset + pair[0].len < pair[1].offset));
            }
        }
    }

    #[test]
    fn equals_the_naive_model_over_a_million_operations() {
        let mut extents = Extents::new(96, 1);
        let mut model = Model {
            used: vec![false; 96],
        };
        let mut held: Vec<Extent> = Vec::new();
        let mut state = 0x1234_5678_9abc_def1_u64;
        let mut dice = |sides: u64| {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            (state >> 33) % sides
        };
        for _ in 0..1_000_000 {
            // Phases of filling and of emptying, so that both ends are met.
            let take = dice(16) < 6 + 4 * (held.len() as u64 % 2);
            if take || held.is_empty() {
                let len = 1 + dice(12);
                let got = extents.alloc(len);
                let at = got.map(|extent| extent.offset as usize);
                assert_eq!(at, model.best_fit(len as usize));
                if let Some(extent) = got {
                    model.set(extent, true);
                    held.push(extent);
                }
            } else {
                let extent = held.swap_remove(dice(held.len() as u64) as usize);
                extents.free(extent);
                model.set(extent, false);
            }
        }
        for extent in held {
            extents.free(extent);
        }
        assert_eq!(extents.iter().count(), 1, "all neighbours are joined");
        assert_eq!(extents.free_bytes(), 96);
    }

    #[test]
    fn sizes_are_rounded_to_the_alignment() {
        let mut extents = Extents::new(10_000, 4096);
        assert_eq!(extents.capacity(), 8192);
        assert_eq!(
            extents.alloc(1),
            Some(Extent {
                offset: 0,
                len: 4096
            })
        );
        assert_eq!(extents.alloc(4097), None);
        assert_eq!(
            extents.alloc(4096),
            Some(Extent {
                offset: 4096,
                len: 4096
            })
        );
    }

    #[test]
    fn sizes_beyond_all_memory_find_no_place() {
        let mut extents = Extents::new(10_000, 4096);
        for len in [u64::MAX, u64::MAX - 4095, 1 << 63] {
            assert_eq!(extents.alloc(len), None);
        }
        assert_eq!(extents.free_bytes(), 8192);
    }

    #[test]
    #[should_panic(expected = "double free")]
    fn double_free_is_refused() {
        let mut extents = Extents::new(100, 1);
        let extent = extents.alloc(10).expect("fits");
        extents.free(extent);
        extents.free(extent);
    }
}
