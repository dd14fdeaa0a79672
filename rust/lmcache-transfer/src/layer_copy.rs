//! Copies of one layer at a time between an engine's cache and memory of the caller's.

use std::sync::Arc;

use lmcache_core::layout::CopyPlan;

use crate::copy_job::ChunkSpan;
use crate::error::TransferError;
use crate::host::PagedCache;

/// Spans of tokens, planned once; any layer of them can then be copied, in any order and more than once.
///
/// Unlike a `CopyJob` it owns no memory: each call brings the bytes of one layer, `[tokens, planes, hidden]`
/// of each span.
#[derive(Debug)]
pub struct LayerCopy {
    paged: Arc<PagedCache>,
    spans: Vec<Planned>,
}

#[derive(Debug)]
struct Planned {
    plan: CopyPlan,
    num_tokens: usize,
    layer_bytes: usize,
}

impl LayerCopy {
    /// Plans the copies; whatever is wrong with the places of the tokens is found here.
    pub fn plan<'a>(
        paged: &Arc<PagedCache>,
        spans: impl IntoIterator<Item = ChunkSpan<'a>>,
    ) -> Result<Self, TransferError> {
        let planned = spans.into_iter().map(|span| {
            let (plan, layer_bytes) = span.plan(paged)?;
            Ok(Planned {
                plan,
                num_tokens: span.num_tokens,
                layer_bytes,
            })
        });
        let spans = planned.collect::<Result<_, TransferError>>()?;
        let paged = Arc::clone(paged);
        Ok(Self { paged, spans })
    }

    /// Bytes that each span takes in one layer.
    pub fn layer_bytes(&self) -> impl ExactSizeIterator<Item = usize> {
        self.spans.iter().map(|span| span.layer_bytes)
    }

    /// Copies one layer of the spans out of the cache: bytes moved.
    ///
    /// All is checked before the first byte moves. Rows of tokens without a slot (-1) are left as they are.
    pub fn gather(&self, layer: usize, targets: &mut [&mut [u8]]) -> Result<usize, TransferError> {
        self.require(layer, targets.iter().map(|target| target.len()))?;
        let call_bytes = self.bytes();
        for (span, target) in self.spans.iter().zip(targets) {
            self.paged.gather(layer, &span.plan, target, call_bytes);
        }
        Ok(call_bytes)
    }

    /// Copies one layer of the spans into the cache: bytes moved.
    ///
    /// All is checked before the first byte moves. Tokens without a slot (-1) are skipped.
    pub fn scatter(&self, layer: usize, sources: &[&[u8]]) -> Result<usize, TransferError> {
        self.require(layer, sources.iter().map(|source| source.len()))?;
        let call_bytes = self.bytes();
        for (span, source) in self.spans.iter().zip(sources) {
            self.paged.scatter(layer, &span.plan, source, call_bytes);
        }
        Ok(call_bytes)
    }

    fn bytes(&self) -> usize {
        self.spans.iter().map(|span| span.plan.bytes()).sum()
    }

    fn require(
        &self,
        layer: usize,
        found: impl ExactSizeIterator<Item = usize>,
    ) -> Result<(), TransferError> {
        let num_layers = self.paged.num_layers();
        if layer >= num_layers {
            return Err(TransferError::NoSuchLayer { layer, num_layers });
        }
        if found.len() != self.spans.len() {
            return Err(TransferError::SpanCount {
                found: found.len(),
                spans: self.spans.len(),
            });
        }
        for (span, found) in self.spans.iter().zip(found) {
            if found != span.layer_bytes {
                return Err(TransferError::LayerSize {
                    num_tokens: span.num_tokens,
                    expected: span.layer_bytes,
                    found,
                });
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use lmcache_core::layout::{PagedLayout, Placement};

    use super::*;

    const NUM_BLOCKS: usize = 4;
    const LAYER_BYTES: usize = NUM_BLOCKS * 2 * 6;

    /// Three layers of four blocks of two tokens: 2 planes of 3 bytes each.
    fn paged() -> Arc<PagedCache> {
        let layers: Vec<Vec<u8>> = (0..3)
            .map(|layer| (0..LAYER_BYTES).map(|at| (layer * 80 + at) as u8).collect())
            .collect();
        let address = |layer: &Vec<u8>| (layer.as_ptr() as usize, LAYER_BYTES);
        let ranges: Vec<_> = layers.iter().map(address).collect();
        let layout = PagedLayout::Tokens {
            block_tokens: 2,
            block_stride: 12,
            token_stride: 6,
            planes: 2,
            plane_stride: 3,
            heads: 1,
            head_stride: 3,
            run_bytes: 3,
        };
        // SAFETY: the vectors are moved in as the owner and not touched but by copies.
        let paged = unsafe { PagedCache::new(&ranges, layout, NUM_BLOCKS, Box::new(layers)) };
        Arc::new(paged.unwrap())
    }

    fn span(slots: &[i64]) -> ChunkSpan<'_> {
        ChunkSpan {
            num_tokens: slots.len(),
            skip: 0,
            placement: Placement::Slots(slots),
        }
    }

    fn layer_of(paged: &Arc<PagedCache>, layer: usize) -> Vec<u8> {
        let all: Vec<i64> = (0..8).collect();
        let mut bytes = vec![0; LAYER_BYTES];
        let copy = LayerCopy::plan(paged, [span(&all)]).unwrap();
        copy.gather(layer, &mut [&mut bytes]).unwrap();
        bytes
    }

    #[test]
    fn one_layer_is_moved_and_no_other() {
        let paged = paged();
        let copy = LayerCopy::plan(&paged, [span(&[5, -1, 0]), span(&[7])]).unwrap();
        assert_eq!(copy.layer_bytes().collect::<Vec<_>>(), [18, 6]);
        let (mut one, mut two) = ([255; 18], [255; 6]);
        assert_eq!(copy.gather(1, &mut [&mut one, &mut two]).unwrap(), 18);
        let token = |slot: u8| (0..6).map(move |at| 80 + slot * 6 + at);
        let wanted: Vec<u8> = token(5).chain([255; 6]).chain(token(0)).collect();
        assert_eq!(
            (&one[..], &two[..]),
            (&wanted[..], &token(7).collect::<Vec<_>>()[..])
        );

        let before: Vec<_> = (0..3).map(|layer| layer_of(&paged, layer)).collect();
        let back = LayerCopy::plan(&paged, [span(&[2, 3, -1])]).unwrap();
        assert_eq!(back.scatter(2, &[&one]).unwrap(), 12);
        let mut wanted = before.clone();
        wanted[2][12..24].copy_from_slice(&one[..12]);
        assert_eq!(
            (0..3)
                .map(|layer| layer_of(&paged, layer))
                .collect::<Vec<_>>(),
            wanted
        );
    }

    #[test]
    fn what_does_not_fit_moves_nothing() {
        let paged = paged();
        assert!(LayerCopy::plan(&paged, [span(&[8])]).is_err());
        let copy = LayerCopy::plan(&paged, [span(&[1]), span(&[2])]).unwrap();
        let before = layer_of(&paged, 0);
        let (right, wrong) = ([9; 6], [9; 7]);
        let sources: [&[&[u8]]; 3] = [&[&right], &[&right, &wrong], &[&right, &right, &right]];
        for sources in sources {
            assert!(copy.scatter(0, sources).is_err());
        }
        let error = copy.scatter(3, &[&right, &right]).unwrap_err();
        assert_eq!(
            error,
            TransferError::NoSuchLayer {
                layer: 3,
                num_layers: 3
            }
        );
        assert_eq!(layer_of(&paged, 0), before);
    }
}
