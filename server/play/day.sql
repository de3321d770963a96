-- One second of the shop's day. An order takes its quantity from the stock in the same transaction, so the stock of all
-- products and the quantities of all orders together are 5000000 at every cut.
USE shop;
SET @product = 1 + FLOOR(RAND() * 5), @quantity = 1 + FLOOR(RAND() * 4);
BEGIN;
INSERT INTO orders (customer_id, product_id, quantity, status, ordered_at)
  VALUES (1 + FLOOR(RAND() * 6), @product, @quantity, 'new', NOW(3));
UPDATE products SET stock = stock - @quantity WHERE id = @product;
COMMIT;
UPDATE orders SET status = 'paid' WHERE status = 'new' AND ordered_at < NOW(3) - INTERVAL 5 SECOND;
UPDATE orders SET status = 'shipped' WHERE status = 'paid' AND ordered_at < NOW(3) - INTERVAL 20 SECOND;
