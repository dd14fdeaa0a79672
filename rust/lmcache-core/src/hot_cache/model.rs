//! The policies as vectors, front to back, searched from end to end: slow and plain.

use std::collections::{HashMap, HashSet};

use super::policy::{Access, Policy};

#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Facts {
    fresh: bool,
    inner: bool,
    /// Of the second list (S3-FIFO, ARC).
    main: bool,
    credit: u8,
    count: u32,
    mark: u32,
}

#[derive(Debug)]
pub(super) struct Model {
    policy: Policy,
    facts: HashMap<u16, Facts>,
    /// One list; S3-FIFO and ARC have two.
    lists: [Vec<u16>; 2],
    held: Vec<u16>,
    /// Position of the held one to ask next.
    asked: usize,
    ghosts: [Vec<u16>; 2],
    touched: HashSet<u16>,
    now: u32,
    base: u32,
    target: usize,
}

impl Model {
    pub(super) fn new(policy: Policy) -> Self {
        Self {
            policy,
            facts: HashMap::new(),
            lists: [Vec::new(), Vec::new()],
            held: Vec::new(),
            asked: 0,
            ghosts: [Vec::new(), Vec::new()],
            touched: HashSet::new(),
            now: 0,
            base: 0,
            target: 0,
        }
    }

    pub(super) fn len(&self) -> usize {
        self.facts.len()
    }

    pub(super) fn has(&self, id: u16) -> bool {
        self.facts.contains_key(&id)
    }

    pub(super) fn num_ghosts(&self) -> usize {
        self.ghosts[0].len() + self.ghosts[1].len()
    }

    pub(super) fn begin_batch(&mut self) {
        self.touched.clear();
    }

    pub(super) fn put(&mut self, id: u16) {
        if self.has(id) {
            if !self.touched.contains(&id) {
                self.walk(&[id], Access::Refresh);
            }
            return;
        }
        self.touched.insert(id);
        self.now += 1;
        let mut facts = Facts {
            fresh: true,
            mark: self.now,
            ..Facts::default()
        };
        let queued = self.lists[0].iter().map(|id| self.facts[id].count);
        self.base = queued.min().unwrap_or(self.base);
        facts.count = self.base;
        let [once, again] = [self.ghosts[0].len(), self.ghosts[1].len()];
        let returned = (0..2).find(|&list| self.ghosts[list].contains(&id));
        if let Some(list) = returned {
            self.ghosts[list].retain(|other| *other != id);
            facts.main = true;
            self.target = match list {
                0 => (self.target + (again / once).max(1)).min(self.len() + 1),
                _ => self.target.saturating_sub((once / again).max(1)),
            };
        }
        self.facts.insert(id, facts);
        match self.policy {
            Policy::Mru => self.move_to_front(id),
            _ => self.move_to_back(id),
        }
    }

    /// The prefix of `ids` that is there.
    pub(super) fn prefix<'a>(&self, ids: &'a [u16]) -> &'a [u16] {
        let found = ids.iter().take_while(|id| self.has(**id)).count();
        &ids[..found]
    }

    pub(super) fn walk(&mut self, ids: &[u16], access: Access) {
        let ids: Vec<u16> = ids.iter().copied().filter(|id| self.has(*id)).collect();
        self.touched.extend(&ids);
        self.now += 1;
        match self.policy {
            Policy::Lru => {
                for &id in ids.iter().rev() {
                    self.move_to_back(id);
                }
            }
            Policy::Fifo => {
                let last_fresh = ids.iter().rposition(|id| self.facts[id].fresh);
                let entering = last_fresh.map_or(0, |last| last + 1);
                for &id in ids[..entering].iter().rev() {
                    self.move_to_back(id);
                }
            }
            Policy::Mru => {
                let first_fresh = ids.iter().position(|id| self.facts[id].fresh);
                for (position, &id) in ids.iter().enumerate() {
                    let last = position + 1 == ids.len();
                    let disordered = first_fresh.is_some_and(|fresh| fresh <= position);
                    if disordered || last && !self.facts[&id].inner {
                        self.move_to_front(id);
                    }
                    if !last {
                        self.fact(id).inner = true;
                    }
                }
            }
            Policy::Lfu => {
                let uses = u32::from(access == Access::Use);
                for (position, &id) in ids.iter().enumerate().rev() {
                    let behind = ids.get(position + 1).map_or(0, |id| self.facts[id].count);
                    let top = self.base + 255;
                    let count = self.facts[&id].count.clamp(self.base, top) + uses;
                    self.fact(id).count = count.max(behind).min(top);
                    self.move_to_back(id);
                }
            }
            Policy::S3Fifo => self.walk_s3_fifo(&ids, access),
            Policy::Arc => self.walk_arc(&ids, access),
        }
        for id in ids {
            self.fact(id).fresh = false;
        }
    }

    fn walk_s3_fifo(&mut self, ids: &[u16], access: Access) {
        for (position, &id) in ids.iter().enumerate().rev() {
            let was = self.facts[&id];
            let behind: Vec<Facts> = ids[position + 1..]
                .iter()
                .map(|id| self.facts[id])
                .collect();
            let behind_main: Vec<u8> = behind.iter().filter(|f| f.main).map(|f| f.credit).collect();
            let least_credit = behind_main.first().copied();
            let held = self.held.contains(&id);
            let now = self.now;
            if access == Access::Use {
                let earned = u8::from(was.main);
                let credit = (was.credit + earned).min(3).max(least_credit.unwrap_or(0));
                self.fact(id).credit = credit;
                self.fact(id).main = true;
                if !was.main || was.fresh || held || !behind.is_empty() {
                    self.move_to_back(id);
                }
                continue;
            }
            let extended = was.fresh || behind.iter().any(|facts| facts.fresh);
            let lifted = !was.main && least_credit.is_some();
            let main = was.main || lifted;
            let moves = held || extended || lifted;
            let fact = self.fact(id);
            fact.main = main;
            fact.credit = fact.credit.max(least_credit.unwrap_or(0));
            if main && behind.iter().any(|facts| !facts.main) || !main && moves {
                fact.mark = now;
            }
            if moves {
                self.move_to_back(id);
            }
        }
    }

    fn walk_arc(&mut self, ids: &[u16], access: Access) {
        for (position, &id) in ids.iter().enumerate().rev() {
            let behind: Vec<Facts> = ids[position + 1..]
                .iter()
                .map(|id| self.facts[id])
                .collect();
            let now = self.now;
            let fact = self.fact(id);
            fact.main |= access == Access::Use || behind.iter().any(|facts| facts.main);
            if !fact.main || behind.iter().any(|facts| !facts.main) {
                fact.mark = now;
            }
            self.move_to_back(id);
        }
    }

    /// Takes out the next to leave that is not leased. `restore` undoes it.
    pub(super) fn evict(&mut self, leased: &HashSet<u16>) -> Option<(u16, Facts)> {
        let goes = |model: &Self, id: u16| !leased.contains(&id) && !model.touched.contains(&id);
        for _ in 0..2 {
            let Some(&id) = self.held.get(self.asked) else {
                break;
            };
            if goes(self, id) {
                let before = self.held[..self.asked].iter().rev();
                self.asked -= before.take_while(|&&id| goes(self, id)).count();
                return Some(self.take_out(self.held[self.asked]));
            }
            self.asked = (self.asked + 1) % self.held.len();
        }
        while let Some(id) = self.candidate() {
            if goes(self, id) {
                return Some(self.take_out(id));
            }
            self.unlink(id);
            self.held.push(id);
        }
        let mut held = self.held.iter().copied();
        let id = held.find(|&id| goes(self, id))?;
        Some(self.take_out(id))
    }

    pub(super) fn restore(&mut self, (id, facts): (u16, Facts)) {
        for ghosts in &mut self.ghosts {
            ghosts.retain(|other| *other != id);
        }
        let count = facts.count.clamp(self.base, self.base + 255);
        self.facts.insert(id, Facts { count, ..facts });
        self.move_to_front(id);
    }

    pub(super) fn remove(&mut self, id: u16) -> bool {
        self.unlink(id);
        let was = self.facts.remove(&id).is_some();
        self.touched.remove(&id);
        self.trim_ghosts();
        was
    }

    fn candidate(&mut self) -> Option<u16> {
        let first = |model: &Self, list: usize| {
            let mut ids = model.lists[list].iter().copied();
            ids.find(|id| !model.touched.contains(id))
        };
        match self.policy {
            Policy::Lru | Policy::Fifo | Policy::Mru => first(self, 0),
            Policy::Lfu => {
                let ids = self.lists[0].iter().copied();
                // The first of equals, in order of use.
                ids.filter(|id| !self.touched.contains(id))
                    .min_by_key(|id| self.facts[id].count)
            }
            Policy::S3Fifo => {
                let small = first(self, 0);
                if small.is_some() && self.lists[0].len() > (self.len() / 10).max(1) {
                    return small;
                }
                let main = loop {
                    let Some(main) = first(self, 1) else {
                        return small;
                    };
                    if self.facts[&main].credit == 0 {
                        break main;
                    }
                    self.fact(main).credit -= 1;
                    self.move_to_back(main);
                };
                match small {
                    Some(small) if self.facts[&main].mark >= self.facts[&small].mark => Some(small),
                    _ => Some(main),
                }
            }
            Policy::Arc => {
                let (Some(once), Some(again)) = (first(self, 0), first(self, 1)) else {
                    return first(self, 0).or(first(self, 1));
                };
                let waits = self.facts[&again].mark >= self.facts[&once].mark;
                let over = self.lists[0].len() > self.target.max(1);
                Some(if over || waits { once } else { again })
            }
        }
    }

    fn take_out(&mut self, id: u16) -> (u16, Facts) {
        let facts = self.facts[&id];
        self.unlink(id);
        self.facts.remove(&id);
        match self.policy {
            Policy::Arc => self.ghosts[usize::from(facts.main)].push(id),
            Policy::S3Fifo => self.ghosts[0].push(id),
            _ => {}
        }
        self.trim_ghosts();
        (id, facts)
    }

    fn trim_ghosts(&mut self) {
        while self.num_ghosts() > self.len() {
            let longer = usize::from(self.ghosts[1].len() > self.ghosts[0].len());
            self.ghosts[longer].remove(0);
        }
    }

    fn fact(&mut self, id: u16) -> &mut Facts {
        self.facts.get_mut(&id).expect("there")
    }

    fn unlink(&mut self, id: u16) {
        for list in &mut self.lists {
            list.retain(|other| *other != id);
        }
        if let Some(at) = self.held.iter().position(|other| *other == id) {
            self.held.remove(at);
            self.asked -= usize::from(at < self.asked);
            if self.asked == self.held.len() {
                self.asked = 0;
            }
        }
    }

    fn move_to_back(&mut self, id: u16) {
        self.unlink(id);
        let list = usize::from(self.facts[&id].main);
        self.lists[list].push(id);
    }

    fn move_to_front(&mut self, id: u16) {
        self.unlink(id);
        let list = usize::from(self.facts[&id].main);
        self.lists[list].insert(0, id);
    }
}
